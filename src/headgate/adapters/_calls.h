/* What modules in C ask of one another without a step through Python, which would cost a request more than most of what
 * is asked: each has a table of it in its state, and hands that over in a capsule. */
#ifndef HEADGATE_CALLS_H
#define HEADGATE_CALLS_H

#include "../_python.h"

/* A request as an ASGI server hands it over. What it has is owned. */
typedef struct {
    PyObject *native;
    PyObject *method;
    PyObject *path;
    PyObject *below;
    PyObject *peer;
} Request;

static inline void
let_go_of(Request *request)
{
    Py_CLEAR(request->native);
    Py_CLEAR(request->method);
    Py_CLEAR(request->path);
    Py_CLEAR(request->below);
    Py_CLEAR(request->peer);
}

/* `AsgiArrival`: the same as Python sees it. */
typedef struct {
    PyObject_HEAD
    Request request;
} Arrival;

#define ASGI_CALLS "headgate.adapters._asgi.calls"

typedef struct {
    void *known;
    PyTypeObject *arrival_type;
    /* What the server has handed over, below that root. False, with an exception, if it is no request. */
    bool (*read)(void *known, Request *request, PyObject *scope, PyObject *root);
    /* The values of all lines of a header, in a list; NULL with an exception. */
    PyObject *(*lines)(void *known, PyObject *scope, PyObject *name);
    /* An `AsgiArrival` that takes the request over, or NULL with an exception. */
    PyObject *(*arrival)(void *known, Request *request);
    /* A `TellingSend`, whose admission is current now, and what ends that. NULL, or false, with an exception. */
    PyObject *(*telling)(void *known, PyObject *send, PyObject *admission);
    bool (*leave)(void *known, PyObject *telling);
} AsgiCalls;

#define WAY_CALLS "headgate.adapters._short_way.calls"

typedef struct {
    void *known;
    PyTypeObject *way_type;
    /* As the methods of `ShortWay`. */
    PyObject *(*admit)(void *known, PyObject *way, const Request *request);
    PyObject *(*recognize)(void *known, PyObject *way, const Request *request);
    PyObject *(*conclude)(void *known, PyObject *way, PyObject *all, PyObject *decision);
} WayCalls;

#define FIELDS_CALLS "headgate.adapters._fields.calls"

typedef struct {
    void *known;
    /* How to tell its methods from others. */
    PyCFunction method;
    /* `Fields.headers`, behind other header fields, which are a list or NULL. */
    PyObject *(*headers)(void *known, PyObject *fields, PyObject *before, PyObject *verdicts, PyObject *now_us);
} FieldsCalls;

#endif
