/* Decisions, as the modules in C make them. Mirrors decisions.py. */
#ifndef HEADGATE_DECISION_H
#define HEADGATE_DECISION_H

#include "_python.h"

enum {
    SAID_ALLOWED,
    SAID_KEYS,
    SAID_VERDICTS,
    SAID_ID,
    SAID_DEGRADED,
    SAID_AT_US,
    SAID_AGAIN_US,
    SAID_COST,
    DECISION_FIELDS
};
enum { VERDICT_FIELDS = 4 };

/* A new reference to the class. */
static inline PyTypeObject *
decision_class(void)
{
    return (PyTypeObject *)taken_from("headgate.decisions", "Decision");
}

/* Whether it is a decision with all of its fields: `tuple.__new__` makes others, too. */
static inline bool
is_decision(PyObject *object, PyTypeObject *type)
{
    return Py_IS_TYPE(object, type) && PyTuple_GET_SIZE(object) == DECISION_FIELDS;
}

/* One that the store itself has made; NULL, with an exception, if there is no memory for it. */
static inline PyObject *
made_decision(PyTypeObject *type, bool is_allowed, PyObject *keys, PyObject *verdicts, PyObject *id, PyObject *now_us,
              PyObject *cost)
{
    PyObject *decision = type->tp_alloc(type, DECISION_FIELDS), *again_us = PyLong_FromLong(0);
    if (decision == NULL || again_us == NULL) {
        Py_XDECREF(decision);
        Py_XDECREF(again_us);
        return NULL;
    }
    PyTuple_SET_ITEM(decision, SAID_ALLOWED, Py_NewRef(is_allowed ? Py_True : Py_False));
    PyTuple_SET_ITEM(decision, SAID_KEYS, Py_NewRef(keys));
    PyTuple_SET_ITEM(decision, SAID_VERDICTS, Py_NewRef(verdicts));
    PyTuple_SET_ITEM(decision, SAID_ID, Py_NewRef(id));
    PyTuple_SET_ITEM(decision, SAID_DEGRADED, Py_NewRef(Py_None));
    PyTuple_SET_ITEM(decision, SAID_AT_US, Py_NewRef(now_us));
    PyTuple_SET_ITEM(decision, SAID_AGAIN_US, again_us);
    PyTuple_SET_ITEM(decision, SAID_COST, Py_NewRef(cost));
    return decision;
}

#endif
