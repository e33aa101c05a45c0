/* A request as an ASGI server hands it over: made in _asgi.c, and read in _short_way.c without asking for names. */
#ifndef HEADGATE_ARRIVAL_H
#define HEADGATE_ARRIVAL_H

#include "../_python.h"

typedef struct {
    PyObject_HEAD
    PyObject *native;
    PyObject *method;
    PyObject *path;
    PyObject *below;
    PyObject *peer;
} Arrival;

#endif
