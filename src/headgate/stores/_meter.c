/* The common check of the memory store in C: all keys are there, written under the same numbers.
 *
 * Whatever is unusual is left to memory.py, by answering None before anything has changed. Nobody can come between
 * the reading of a state and the writing of the next: the interpreter's lock is held, and nothing that is called here
 * runs Python code, as the collector, which could, is told to wait. */
#include "../_decision.h"

#include "../algorithms/token_bucket.h"
#include "../algorithms/gcra.h"
#include "../algorithms/leaky_bucket.h"
#include "../algorithms/fixed_window.h"
#include "../algorithms/sliding_window.h"

enum { MOST_KEYS = 16, WIDEST = 3 };

/* An instant within this is far from where sums of instants would not fit. */
static const whole FARTHEST_US = (whole)1 << 62;

typedef struct {
    const char *name;
    Verdict (*decide)(whole *state, whole now_us, whole cost, const Numbers *limit);
    bool (*is_ahead)(const whole *state, whole now_us, const Numbers *limit);
    /* How many whole numbers a state is: one by itself, or a tuple of several. */
    Py_ssize_t width;
} Formula;

static const Formula FORMULAS[] = {
    {"token_bucket", token_bucket, token_bucket_is_ahead, 1},
    {"gcra", gcra, gcra_is_ahead, 1},
    {"leaky_bucket", leaky_bucket, gcra_is_ahead, 1},
    {"fixed_window", fixed_window, fixed_window_is_ahead, 2},
    {"sliding_window", sliding_window, sliding_window_is_ahead, 3},
};

enum { NUMBER_OF_FORMULAS = sizeof(FORMULAS) / sizeof(FORMULAS[0]) };

typedef struct {
    PyTypeObject *meter_type;
    PyTypeObject *decision_type;
    Place space_in_limit;
    Place meter_in_space;
} Names;

typedef struct {
    PyObject_HEAD
    PyObject *limit;
    PyObject *states;
    const Formula *formula;
    Numbers numbers;
} Meter;

/* What is known of one key while a request is decided. Nothing here is owned: keys, spaces and their states outlive
 * the decision, as nobody else runs. */
typedef struct {
    const Meter *meter;
    PyObject *identity;
    whole cost;
    whole before[WIDEST];
    whole after[WIDEST];
    Verdict verdict;
    PyObject *new_state;
} Slot;

/* -- Meter: a limit's formula, its numbers and its counters, side by side ------------------------------------------ */

static bool
read_number(PyObject *limit, const char *name, whole *read)
{
    PyObject *number = PyObject_GetAttrString(limit, name);
    if (number == NULL) {
        return false;
    }
    /* The formulas divide by these; no `Limit` has one below 1. */
    bool is_read = read_whole(number, read) && *read > 0;
    if (!is_read) {
        PyErr_Format(PyExc_OverflowError, "%s %R is not a whole number from 1 to 128 bits", name, number);
    }
    Py_DECREF(number);
    return is_read;
}

static const Formula *
formula_of(PyObject *limit)
{
    const Formula *found = NULL;
    PyObject *algorithm = PyObject_GetAttrString(limit, "algorithm");
    if (algorithm == NULL) {
        return NULL;
    }
    for (int index = 0; index < NUMBER_OF_FORMULAS && found == NULL; index++) {
        if (PyUnicode_Check(algorithm) && PyUnicode_CompareWithASCIIString(algorithm, FORMULAS[index].name) == 0) {
            found = &FORMULAS[index];
        }
    }
    if (found == NULL) {
        PyErr_Format(PyExc_LookupError, "no formula in C for %R", algorithm);
    }
    Py_DECREF(algorithm);
    return found;
}

static PyObject *
meter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"limit", "states", NULL};
    PyObject *limit, *states;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!", names, &limit, &PyDict_Type, &states)) {
        return NULL;
    }
    const Formula *formula = formula_of(limit);
    Numbers numbers;
    if (formula == NULL || !read_number(limit, "quota", &numbers.quota) ||
        !read_number(limit, "period_us", &numbers.period_us) || !read_number(limit, "tokens", &numbers.tokens) ||
        !read_number(limit, "ticks", &numbers.ticks) || !read_number(limit, "full", &numbers.full)) {
        return NULL;
    }
    Meter *meter = (Meter *)type->tp_alloc(type, 0);
    if (meter != NULL) {
        meter->limit = Py_NewRef(limit);
        meter->states = Py_NewRef(states);
        meter->formula = formula;
        meter->numbers = numbers;
    }
    return (PyObject *)meter;
}

static void
meter_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((Meter *)self)->limit);
    Py_XDECREF(((Meter *)self)->states);
    type->tp_free(self);
    Py_DECREF(type);
}

/* -- charge -------------------------------------------------------------------------------------------------------- */

static bool
read_state(PyObject *state, Py_ssize_t width, whole *read)
{
    if (width == 1) {
        return read_whole(state, read);
    }
    if (!PyTuple_CheckExact(state) || PyTuple_GET_SIZE(state) != width) {
        return false;
    }
    for (Py_ssize_t index = 0; index < width; index++) {
        if (!read_whole(PyTuple_GET_ITEM(state, index), &read[index])) {
            return false;
        }
    }
    return true;
}

static PyObject *
made_tuple(const whole *numbers, Py_ssize_t width)
{
    PyObject *tuple = PyTuple_New(width);
    for (Py_ssize_t index = 0; tuple != NULL && index < width; index++) {
        PyObject *number = made_whole(numbers[index]);
        if (number == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, index, number);
    }
    return tuple;
}

/* The key's meter and state. False, without an exception, if anything about it is unusual. */
static bool
find(Names *known, PyObject *spaces, PyObject *key, PyObject *cost, whole now_us, Slot *slot)
{
    if (!PyTuple_Check(key) || PyTuple_GET_SIZE(key) != 3 || !read_whole(cost, &slot->cost) || slot->cost < 0 ||
        slot->cost > FARTHEST_US) {
        return false;
    }
    PyObject *limit = PyTuple_GET_ITEM(key, 0), *identity = PyTuple_GET_ITEM(key, 2);
    PyObject *name = kept_in(&known->space_in_limit, limit, "space");
    PyObject *space = name == NULL ? NULL : PyDict_GetItemWithError(spaces, name);
    PyObject *meter = space == NULL ? NULL : kept_in(&known->meter_in_space, space, "meter");
    if (meter == NULL || !Py_IS_TYPE(meter, known->meter_type) || !PyUnicode_CheckExact(identity)) {
        PyErr_Clear();
        return false;
    }
    slot->meter = (const Meter *)meter;
    slot->identity = identity;
    if (slot->meter->limit != limit) {
        return false;
    }
    PyObject *state = PyDict_GetItemWithError(slot->meter->states, identity);
    const Formula *formula = slot->meter->formula;
    return state != NULL && read_state(state, formula->width, slot->before) &&
           !formula->is_ahead(slot->before, now_us, &slot->meter->numbers);
}

static Verdict
decide(const Slot *slot, whole *state, whole now_us, whole cost)
{
    memcpy(state, slot->before, sizeof(slot->before));
    return slot->meter->formula->decide(state, now_us, cost, &slot->meter->numbers);
}

/* Put the states after the request in, all or, if there is no memory for them, none. */
static bool
spend(Slot *slots, Py_ssize_t count)
{
    bool is_made = true;
    for (Py_ssize_t index = 0; index < count; index++) {
        Slot *slot = &slots[index];
        Py_ssize_t width = slot->meter->formula->width;
        slot->new_state = NULL;
        if (slot->cost && is_made) {
            slot->new_state = width == 1 ? made_whole(slot->after[0]) : made_tuple(slot->after, width);
            is_made = slot->new_state != NULL;
        }
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        Slot *slot = &slots[index];
        if (slot->new_state != NULL && is_made) { /* the key is there already, so that this takes no memory */
            is_made = PyDict_SetItem(slot->meter->states, slot->identity, slot->new_state) == 0;
        }
        Py_XDECREF(slot->new_state);
    }
    return is_made;
}

static PyObject *
told(const Names *known, bool is_allowed, PyObject *keys, const Slot *slots, PyObject *id, PyObject *now_us,
     PyObject *costs)
{
    Py_ssize_t count = PyTuple_GET_SIZE(keys);
    PyObject *verdicts = PyTuple_New(count);
    for (Py_ssize_t index = 0; verdicts != NULL && index < count; index++) {
        const Verdict *verdict = &slots[index].verdict;
        const whole numbers[] = {verdict->remaining, verdict->retry_us, verdict->reset_us, verdict->delay_us};
        PyObject *tuple = made_tuple(numbers, VERDICT_FIELDS);
        if (tuple == NULL) {
            Py_CLEAR(verdicts);
            break;
        }
        PyTuple_SET_ITEM(verdicts, index, tuple);
    }
    if (verdicts == NULL) {
        return NULL;
    }
    PyObject *decision = made_decision(known->decision_type, is_allowed, keys, verdicts, id, now_us, costs);
    Py_DECREF(verdicts);
    return decision;
}

static PyObject *
charge_all(void *module_state, PyObject *spaces, PyObject *keys, PyObject *costs, PyObject *id, PyObject *at_us)
{
    Names *known = module_state;
    Py_ssize_t count = PyTuple_GET_SIZE(keys);
    whole now_us;
    if (count == 0 || count > MOST_KEYS || !read_whole(at_us, &now_us) || now_us > FARTHEST_US ||
        now_us < -FARTHEST_US || (PyTuple_Check(costs) && PyTuple_GET_SIZE(costs) != count)) {
        Py_RETURN_NONE;
    }
    Slot slots[MOST_KEYS];
    bool is_allowed = true;
    for (Py_ssize_t index = 0; index < count; index++) {
        Slot *slot = &slots[index];
        PyObject *cost = PyTuple_Check(costs) ? PyTuple_GET_ITEM(costs, index) : costs;
        if (!find(known, spaces, PyTuple_GET_ITEM(keys, index), cost, now_us, slot)) {
            Py_RETURN_NONE;
        }
        slot->verdict = decide(slot, slot->after, now_us, slot->cost);
        is_allowed = is_allowed && !slot->verdict.retry_us;
    }
    int was_collecting = PyGC_Disable();
    PyObject *decision = NULL;
    if (!is_allowed) {
        /* Where it would have passed, nothing is spent: what it is told is what a peek says. */
        for (Py_ssize_t index = 0; index < count; index++) {
            Slot *slot = &slots[index];
            if (!slot->verdict.retry_us) {
                slot->verdict = decide(slot, slot->after, now_us, 0);
            }
        }
    }
    if (!is_allowed || spend(slots, count)) {
        decision = told(known, is_allowed, keys, slots, id, at_us, costs);
    }
    if (was_collecting) {
        PyGC_Enable();
    }
    return decision;
}

PyDoc_STRVAR(charge_doc,
             "charge(spaces, keys, cost, id, now_us, is_busy, /)\n--\n\n"
             "Charge all keys or none. None, with nothing changed, where that takes more than the common case.");

static PyObject *
charge(PyObject *module, PyObject *const *args, Py_ssize_t number)
{
    if (number != 6 || !PyDict_Check(args[0]) || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "charge(spaces: dict, keys: tuple, cost, id, now_us, is_busy)");
        return NULL;
    }
    if (args[5] != Py_False || args[3] != Py_None) { /* checks with an id are left to Python */
        Py_RETURN_NONE;
    }
    return charge_all(PyModule_GetState(module), args[0], args[1], args[2], args[3], args[4]);
}

/* -- The module ---------------------------------------------------------------------------------------------------- */

static PyType_Slot METER_SLOTS[] = {
    {Py_tp_new, meter_new},
    {Py_tp_dealloc, meter_dealloc},
    {Py_tp_doc, "Meter(limit, states)\n--\n\nA limit's formula and numbers, with its counters, for `charge`."},
    {0, NULL},
};

static PyType_Spec METER = {
    .name = "headgate.stores._meter.Meter",
    .basicsize = sizeof(Meter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = METER_SLOTS,
};

static int
begin(PyObject *module)
{
    Names *known = PyModule_GetState(module);
    known->decision_type = decision_class();
    if (known->decision_type == NULL) {
        return -1;
    }
    known->meter_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &METER, NULL);
    if (known->meter_type == NULL || PyModule_AddType(module, known->meter_type) < 0) {
        return -1;
    }
    PyObject *names = PyTuple_New(NUMBER_OF_FORMULAS);
    for (Py_ssize_t index = 0; names != NULL && index < NUMBER_OF_FORMULAS; index++) {
        PyObject *name = PyUnicode_FromString(FORMULAS[index].name);
        if (name == NULL) {
            Py_CLEAR(names);
            break;
        }
        PyTuple_SET_ITEM(names, index, name);
    }
    if (names == NULL || PyModule_AddObjectRef(module, "METERED", names) < 0) {
        Py_XDECREF(names);
        return -1;
    }
    Py_DECREF(names);
    return 0;
}

static int
visit(PyObject *module, visitproc visit, void *arg)
{
    Names *known = PyModule_GetState(module);
    Py_VISIT(known->meter_type);
    Py_VISIT(known->decision_type);
    Py_VISIT(known->space_in_limit.type);
    Py_VISIT(known->meter_in_space.type);
    return 0;
}

static int
clear(PyObject *module)
{
    Names *known = PyModule_GetState(module);
    Py_CLEAR(known->meter_type);
    Py_CLEAR(known->decision_type);
    Py_CLEAR(known->space_in_limit.type);
    Py_CLEAR(known->meter_in_space.type);
    return 0;
}

static void
end(void *module)
{
    clear(module);
}

static PyMethodDef METHODS[] = {
    {"charge", (PyCFunction)(void (*)(void))charge, METH_FASTCALL, charge_doc},
    {NULL, NULL, 0, NULL},
};

/* Without Python's lock the store is always busy, and does not come here. */
static PyModuleDef_Slot MODULE_SLOTS[] = {{Py_mod_exec, begin}, KEEPS_TO_ITSELF, {0, NULL}};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "headgate.stores._meter",
    .m_doc = "The common check of the memory store, compiled.",
    .m_size = sizeof(Names),
    .m_methods = METHODS,
    .m_slots = MODULE_SLOTS,
    .m_traverse = visit,
    .m_clear = clear,
    .m_free = end,
};

PyMODINIT_FUNC
PyInit__meter(void)
{
    return PyModuleDef_Init(&MODULE);
}
