/* What the common check of the memory store is to other modules in C: a table in the state of _meter.c, which hands it
 * over in a capsule. */
#ifndef HEADGATE_METER_H
#define HEADGATE_METER_H

#include "../_decision.h"

#define METER_CALLS "headgate.stores._meter.calls"

typedef struct {
    void *known;
    /* `charge` of a store that is not busy; keys are a tuple. */
    PyObject *(*charge)(void *known, PyObject *spaces, PyObject *keys, PyObject *costs, PyObject *id, PyObject *now_us);
} MeterCalls;

#endif
