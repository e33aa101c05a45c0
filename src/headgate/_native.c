/* Optional speedups: pure functions, each with a Python twin that the tests compare it with.
 *
 *     Meter, charge      the common check of the memory store    stores/memory.py
 *     admit              the same, without a decision            stores/memory.py
 *     pack_keys          the keys of a batch for Redis           plain_pack_keys in stores/redis/encoding.py
 *     decode_allowed     the reply to a batch                    plain_answers in stores/redis/decoding.py
 *     translate_check    a check on the limits of a region       plain_translate_check in regions/routing.py
 *     replace_fields     another Key, Check or Decision          plain_replace_fields in regions/routing.py
 *     add_usage          usage that other regions must know      plain_add_usage in regions/reconciled.py
 *     finish_check       the decision on a caller's limits       RegionRouter.finish in regions/routing.py
 *     RateLimitHeaders   the header fields of a response         PlainRateLimitHeaders in gate/headers.py
 *
 * Only the public C API is used. A function returns None for input that is not the common case, before it has changed
 * anything; Python then handles the request. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "algorithms/_exact.h"
#include "algorithms/token_bucket.h"
#include "algorithms/gcra.h"
#include "algorithms/leaky_bucket.h"
#include "algorithms/fixed_window.h"
#include "algorithms/sliding_window.h"

/* The fields of Key, Check and Decision, and of a reply; the tests compare them with the Python classes. */
enum { KEY_LIMIT, KEY_PARTS, KEY_IDENTITY, KEY_FIELDS };
enum { CHECK_KEYS, CHECK_COST, CHECK_ID, CHECK_FIELDS };
enum { REPLY_NOW, REPLY_NUMBERS, REPLY_UNUSUAL, REPLY_AGAIN, REPLY_FIELDS };
enum { VERDICT_FIELDS = 4 };
enum {
    DECISION_ALLOWED, DECISION_KEYS, DECISION_VERDICTS, DECISION_ID, DECISION_DEGRADED, DECISION_AT_US,
    DECISION_NEXT_ALLOWED, DECISION_COST, DECISION_FIELDS
};

typedef union {
    struct {
        PyTypeObject *key_type, *limit_type, *decision_type, *meter_type, *headers_type;
        PyObject *space, *region, *remaining_name, *reset_name, *ratelimit_name;
    };
    PyObject *references[10]; /* all of them */
} ModuleState;

/* -- Integers ------------------------------------------------------------------------------------------------------ */

#if PY_VERSION_HEX >= 0x030D0000

static bool read_wide(PyObject *number, int128 *value) {
    return PyLong_AsNativeBytes(number, value, sizeof(*value), -1) <= (Py_ssize_t)sizeof(*value);
}

static PyObject *new_wide(int128 value) {
    return PyLong_FromNativeBytes(&value, sizeof(value), -1);
}

#else

/* Before 3.13, no public function converts more than 64 bits. Below 2**115, a double holds the high bits exactly. */
enum { LOW_BITS = 62 };

static bool read_wide(PyObject *number, int128 *value) {
    double all = PyLong_AsDouble(number);
    if (all >= 0x1p115 || all <= -0x1p115 || (all == -1.0 && PyErr_Occurred())) {
        PyErr_Clear();
        return false;
    }
    unsigned long long low = PyLong_AsUnsignedLongLongMask(number);
    double high = (all - (double)low) * 0x1p-64;
    *value = (int128)(long long)(high < 0 ? high - 0.5 : high + 0.5) * ((int128)1 << 64) + low;
    return true;
}

static PyObject *new_wide(int128 value) {
    PyObject *high = PyLong_FromDouble((double)(long long)(value >> LOW_BITS) * 0x1p62);
    PyObject *low = PyLong_FromLongLong((long long)(value & (((int128)1 << LOW_BITS) - 1)));
    PyObject *number = high == NULL || low == NULL ? NULL : PyNumber_Add(high, low);
    Py_XDECREF(high);
    Py_XDECREF(low);
    return number;
}

#endif

/* Returns false, without an exception, for anything but an int that fits. */
static bool read_int(PyObject *number, int128 *value) {
    if (!PyLong_CheckExact(number)) return false;
    int overflow;
    *value = PyLong_AsLongLongAndOverflow(number, &overflow);
    return !overflow || read_wide(number, value);
}

static PyObject *new_int(int128 value) {
    return (long long)value == value ? PyLong_FromLongLong((long long)value) : new_wide(value);
}

static PyObject *new_int_tuple(const int128 *values, Py_ssize_t size) {
    PyObject *tuple = PyTuple_New(size);
    for (Py_ssize_t index = 0; tuple != NULL && index < size; index++) {
        PyObject *number = new_int(values[index]);
        if (number == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, index, number);
    }
    return tuple;
}

/* A new Decision that comes from the store itself; NULL with an exception. */
static PyObject *new_decision(const ModuleState *state, bool is_allowed, PyObject *keys, PyObject *verdicts,
                              PyObject *id, PyObject *now_us, PyObject *cost) {
    PyObject *decision = state->decision_type->tp_alloc(state->decision_type, DECISION_FIELDS);
    if (decision == NULL) return NULL;
    /* allowed, keys, verdicts, id, degraded, at_us, next_allowed_us, cost */
    PyObject *zero = PyLong_FromLong(0), *allowed = is_allowed ? Py_True : Py_False; /* small ints exist once */
    PyObject *fields[DECISION_FIELDS] = {allowed, keys, verdicts, id, Py_None, now_us, zero, cost};
    for (Py_ssize_t index = 0; index < DECISION_FIELDS; index++) {
        PyTuple_SET_ITEM(decision, index, Py_NewRef(fields[index]));
    }
    Py_DECREF(zero);
    return decision;
}

/* -- Memory store: Meter and charge -------------------------------------------------------------------------------- */

enum { MAX_KEYS = 16, MAX_STATE_SIZE = 3 };

/* Instants and costs up to here leave room for sums of them. */
static const int128 MAX_MAGNITUDE = (int128)1 << 62;

typedef struct {
    const char *name;
    Verdict (*decide)(int128 *state, int128 now_us, int128 cost, const LimitNumbers *limit);
    bool (*is_ahead)(const int128 *state, int128 now_us, const LimitNumbers *limit);
    /* 1: the state is an int; else a tuple of so many. */
    Py_ssize_t state_size;
} Algorithm;

static const Algorithm ALGORITHMS[] = {
    {"token_bucket", token_bucket, token_bucket_is_ahead, 1},
    {"gcra", gcra, gcra_is_ahead, 1},
    {"leaky_bucket", leaky_bucket, gcra_is_ahead, 1},
    {"fixed_window", fixed_window, fixed_window_is_ahead, 2},
    {"sliding_window", sliding_window, sliding_window_is_ahead, 3},
};

enum { ALGORITHM_COUNT = sizeof(ALGORITHMS) / sizeof(ALGORITHMS[0]) };

typedef struct {
    PyObject_HEAD
    PyObject *limit, *states;
    const Algorithm *algorithm;
    LimitNumbers numbers;
} Meter;

/* One key of a request while it is decided. All references are borrowed: nothing that is called in the meantime runs
 * Python code, so keys, meters and states stay alive. */
typedef struct {
    const Meter *meter;
    PyObject *identity;
    int128 cost, before[MAX_STATE_SIZE], after[MAX_STATE_SIZE];
    Verdict verdict;
    PyObject *new_state;
} Charge;

static bool read_limit_number(PyObject *limit, const char *name, int128 *value) {
    PyObject *number = PyObject_GetAttrString(limit, name);
    if (number == NULL) return false;
    /* The algorithms divide by these; no `Limit` has one below 1. */
    bool is_valid = read_int(number, value) && *value > 0;
    if (!is_valid) {
        PyErr_Format(PyExc_OverflowError, "%s %R is not a positive integer of at most 114 bits", name, number);
    }
    Py_DECREF(number);
    return is_valid;
}

static const Algorithm *find_algorithm(PyObject *limit) {
    PyObject *name = PyObject_GetAttrString(limit, "algorithm");
    if (name == NULL) return NULL;
    const Algorithm *algorithm = NULL;
    for (int index = 0; index < ALGORITHM_COUNT && PyUnicode_Check(name) && algorithm == NULL; index++) {
        if (PyUnicode_CompareWithASCIIString(name, ALGORITHMS[index].name) == 0) {
            algorithm = &ALGORITHMS[index];
        }
    }
    if (algorithm == NULL) PyErr_Format(PyExc_LookupError, "no algorithm in C for %R", name);
    Py_DECREF(name);
    return algorithm;
}

static PyObject *meter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"limit", "states", NULL};
    PyObject *limit, *states;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!", names, &limit, &PyDict_Type, &states)) return NULL;
    const Algorithm *algorithm = find_algorithm(limit);
    LimitNumbers numbers;
    if (algorithm == NULL || !read_limit_number(limit, "quota", &numbers.quota) ||
        !read_limit_number(limit, "period_us", &numbers.period_us) ||
        !read_limit_number(limit, "tokens", &numbers.tokens) || !read_limit_number(limit, "ticks", &numbers.ticks) ||
        !read_limit_number(limit, "full", &numbers.full)) {
        return NULL;
    }
    Meter *meter = (Meter *)type->tp_alloc(type, 0);
    if (meter != NULL) {
        meter->limit = Py_NewRef(limit);
        meter->states = Py_NewRef(states);
        meter->algorithm = algorithm;
        meter->numbers = numbers;
    }
    return (PyObject *)meter;
}

static void meter_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((Meter *)self)->limit);
    Py_XDECREF(((Meter *)self)->states);
    type->tp_free(self);
    Py_DECREF(type);
}

static bool read_state(PyObject *state, Py_ssize_t size, int128 *values) {
    if (size == 1) return read_int(state, values);
    if (!PyTuple_CheckExact(state) || PyTuple_GET_SIZE(state) != size) return false;
    for (Py_ssize_t index = 0; index < size; index++) {
        if (!read_int(PyTuple_GET_ITEM(state, index), &values[index])) return false;
    }
    return true;
}

/* Fills in meter, cost and state of a key. Returns false, without an exception, for anything unusual. */
static bool find_counter(const ModuleState *module, PyObject *meters, PyObject *key, PyObject *cost, int128 now_us,
                         Charge *charge) {
    if (!Py_IS_TYPE(key, module->key_type) || PyTuple_GET_SIZE(key) != KEY_FIELDS || !read_int(cost, &charge->cost) ||
        charge->cost < 0 || charge->cost > MAX_MAGNITUDE) {
        return false;
    }
    PyObject *limit = PyTuple_GET_ITEM(key, KEY_LIMIT), *identity = PyTuple_GET_ITEM(key, KEY_IDENTITY);
    /* Of exactly this class: an attribute of another could be a property, which runs Python code. */
    if (!Py_IS_TYPE(limit, module->limit_type) || !PyUnicode_CheckExact(identity)) return false;
    PyObject *space = PyObject_GetAttr(limit, module->space);
    PyObject *meter = space == NULL ? NULL : PyDict_GetItemWithError(meters, space);
    Py_XDECREF(space);
    if (meter == NULL || !Py_IS_TYPE(meter, module->meter_type) || ((const Meter *)meter)->limit != limit) {
        PyErr_Clear();
        return false;
    }
    charge->meter = (const Meter *)meter;
    charge->identity = identity;
    const Algorithm *algorithm = charge->meter->algorithm;
    PyObject *state = PyDict_GetItemWithError(charge->meter->states, identity);
    return state != NULL && read_state(state, algorithm->state_size, charge->before) &&
           !algorithm->is_ahead(charge->before, now_us, &charge->meter->numbers);
}

/* True if an earlier key of the request is the same counter. */
static bool is_repeated(const Charge *charges, Py_ssize_t index) {
    for (Py_ssize_t other = 0; other < index; other++) {
        if (charges[other].meter == charges[index].meter &&
            PyUnicode_Compare(charges[other].identity, charges[index].identity) == 0) {
            return true;
        }
    }
    return false;
}

static void decide(Charge *charge, int128 now_us, int128 cost) {
    memcpy(charge->after, charge->before, sizeof(charge->before));
    charge->verdict = charge->meter->algorithm->decide(charge->after, now_us, cost, &charge->meter->numbers);
}

/* Stores the states after the request: all of them or, if memory runs out, none. */
static bool store_states(Charge *charges, Py_ssize_t count) {
    bool is_ok = true;
    for (Py_ssize_t index = 0; index < count; index++) {
        Charge *charge = &charges[index];
        Py_ssize_t size = charge->meter->algorithm->state_size;
        charge->new_state = NULL;
        if (charge->cost && is_ok) {
            charge->new_state = size == 1 ? new_int(charge->after[0]) : new_int_tuple(charge->after, size);
            is_ok = charge->new_state != NULL;
        }
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        Charge *charge = &charges[index];
        if (charge->new_state != NULL && is_ok) { /* replaces a value, which needs no memory */
            is_ok = PyDict_SetItem(charge->meter->states, charge->identity, charge->new_state) == 0;
        }
        Py_XDECREF(charge->new_state);
    }
    return is_ok;
}

static PyObject *charge_decision(const ModuleState *module, bool is_allowed, PyObject *keys, const Charge *charges,
                                 int128 now_us, PyObject *cost) {
    Py_ssize_t count = PyTuple_GET_SIZE(keys);
    PyObject *at_us = new_int(now_us), *verdicts = at_us == NULL ? NULL : PyTuple_New(count), *decision = NULL;
    for (Py_ssize_t index = 0; verdicts != NULL && index < count; index++) {
        const Verdict *verdict = &charges[index].verdict;
        const int128 numbers[] = {verdict->remaining, verdict->retry_us, verdict->reset_us, verdict->delay_us};
        PyObject *tuple = new_int_tuple(numbers, VERDICT_FIELDS);
        if (tuple == NULL) {
            Py_CLEAR(verdicts);
            break;
        }
        PyTuple_SET_ITEM(verdicts, index, tuple);
    }
    if (verdicts != NULL) {
        decision = new_decision(module, is_allowed, keys, verdicts, Py_None, at_us, cost);
    }
    Py_XDECREF(at_us);
    Py_XDECREF(verdicts);
    return decision;
}

/* The arguments that charge and admit share. */
typedef struct {
    PyObject *meters, *keys, *cost;
    Py_ssize_t count;
    int128 now_us;
    bool is_allowed;
} Request;

/* Reads and decides all keys of a request. Returns false, without an exception, for anything unusual. */
static bool decide_all(const ModuleState *module, PyObject *const *args, PyObject *is_busy, Request *request,
                       Charge *charges) {
    PyObject *cost = args[2];
    int128 now_ns;
    *request = (Request){args[0], args[1], cost, PyTuple_GET_SIZE(args[1]), 0, true};
    if (is_busy != Py_False || request->count == 0 || request->count > MAX_KEYS || !read_int(args[3], &now_ns) ||
        (PyTuple_Check(cost) && PyTuple_GET_SIZE(cost) != request->count)) {
        return false;
    }
    request->now_us = floor_div(now_ns, 1000);
    if (request->now_us > MAX_MAGNITUDE || request->now_us < -MAX_MAGNITUDE) return false;
    for (Py_ssize_t index = 0; index < request->count; index++) {
        Charge *charge = &charges[index];
        PyObject *each = PyTuple_Check(cost) ? PyTuple_GET_ITEM(cost, index) : cost;
        if (!find_counter(module, request->meters, PyTuple_GET_ITEM(request->keys, index), each, request->now_us,
                          charge) ||
            is_repeated(charges, index)) {
            return false;
        }
        decide(charge, request->now_us, charge->cost);
        request->is_allowed = request->is_allowed && !charge->verdict.retry_us;
    }
    return true;
}

PyDoc_STRVAR(charge_doc,
             "charge(meters, keys, cost, now_ns, is_busy, /)\n--\n\n"
             "Charge all keys or none and return the Decision.\n\n"
             "Return None, with nothing changed, unless all keys are different, exist and were written under the\n"
             "same numbers. `meters` are the Meters by limit space; `is_busy` is True while counters change.");

/* No other thread or finalizer runs between reading the states and storing the new ones: the GIL is held, nothing
 * that is called runs Python code, and the garbage collector is off. */
static PyObject *charge(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5 || !PyDict_Check(args[0]) || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected charge(meters: dict, keys: tuple, cost, now_ns, is_busy)");
        return NULL;
    }
    const ModuleState *module = PyModule_GetState(self);
    Charge charges[MAX_KEYS];
    Request request;
    if (!decide_all(module, args, args[4], &request, charges)) Py_RETURN_NONE;
    int gc_was_enabled = PyGC_Disable();
    /* A denied request is not charged: where it would have passed, the verdict is that of a peek. */
    for (Py_ssize_t index = 0; !request.is_allowed && index < request.count; index++) {
        if (!charges[index].verdict.retry_us) decide(&charges[index], request.now_us, 0);
    }
    PyObject *decision = NULL;
    if (!request.is_allowed || store_states(charges, request.count)) {
        decision =
            charge_decision(module, request.is_allowed, request.keys, charges, request.now_us, request.cost);
    }
    if (gc_was_enabled) PyGC_Enable();
    return decision;
}

PyDoc_STRVAR(admit_doc,
             "admit(meters, keys, cost, now_ns, floors, is_busy, /)\n--\n\n"
             "Charge all keys, and return True, if at least so much as `floors` would be left of each.\n\n"
             "Return False, with nothing changed, in all other cases, also those in which `charge` returns None.");

static PyObject *admit(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 6 || !PyDict_Check(args[0]) || !PyTuple_Check(args[1]) || !PyTuple_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError,
                        "expected admit(meters: dict, keys: tuple, cost, now_ns, floors: tuple, is_busy)");
        return NULL;
    }
    PyObject *floors = args[4];
    Charge charges[MAX_KEYS];
    Request request;
    if (!decide_all(PyModule_GetState(self), args, args[5], &request, charges) || !request.is_allowed ||
        PyTuple_GET_SIZE(floors) != request.count) {
        Py_RETURN_FALSE;
    }
    for (Py_ssize_t index = 0; index < request.count; index++) {
        int128 floor;
        if (!read_int(PyTuple_GET_ITEM(floors, index), &floor) || charges[index].verdict.remaining < floor) {
            Py_RETURN_FALSE;
        }
    }
    int gc_was_enabled = PyGC_Disable();
    bool is_stored = store_states(charges, request.count);
    if (gc_was_enabled) PyGC_Enable();
    return is_stored ? Py_NewRef(Py_True) : NULL;
}

/* -- Redis: pack_keys and decode_allowed --------------------------------------------------------------------------- */

/* Larger batches and longer texts are left to Python: lengths have at most 5 digits, and their sum cannot overflow. */
enum { MAX_TEXT = 49999, MAX_BATCH_KEYS = 1 << 16 };

/* The same as EXACT in limits.py. */
#define EXACT (1LL << 53)

/* True if two costs are equal. Compares only ints and tuples of ints: other types could run Python code, which could
 * change the batch while it is packed. */
static bool is_same_cost(PyObject *one, PyObject *other) {
    if (one == other) return true;
    if (PyLong_CheckExact(one) && PyLong_CheckExact(other)) {
        return PyObject_RichCompareBool(one, other, Py_EQ) == 1;
    }
    if (!PyTuple_CheckExact(one) || !PyTuple_CheckExact(other) || PyTuple_GET_SIZE(one) != PyTuple_GET_SIZE(other)) {
        return false;
    }
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(one); index++) {
        PyObject *left = PyTuple_GET_ITEM(one, index), *right = PyTuple_GET_ITEM(other, index);
        if (!PyLong_CheckExact(left) || !PyLong_CheckExact(right) ||
            PyObject_RichCompareBool(left, right, Py_EQ) != 1) {
            return false;
        }
    }
    return true;
}

/* The bytes of a text that is stored unchanged: ASCII without braces, which a cluster reads as hash tags. Returns NULL,
 * without an exception, for any other. */
static const char *plain_bytes(PyObject *text, Py_ssize_t *length) {
    const char *bytes = PyUnicode_CheckExact(text) ? PyUnicode_AsUTF8AndSize(text, length) : NULL;
    if (bytes == NULL) { /* also for a lone surrogate */
        PyErr_Clear();
        return NULL;
    }
    bool is_plain = *length == PyUnicode_GetLength(text) && *length <= MAX_TEXT &&
                    !memchr(bytes, '{', (size_t)*length) && !memchr(bytes, '}', (size_t)*length);
    return is_plain ? bytes : NULL;
}

static bool is_check(PyObject *check) {
    return PyTuple_Check(check) && PyTuple_GET_SIZE(check) == CHECK_FIELDS &&
           PyTuple_Check(PyTuple_GET_ITEM(check, CHECK_KEYS));
}

/* The identity of a check under one of the limits; NULL, without an exception, if limits, cost or id differ. */
static PyObject *find_identity(PyObject *check, PyObject *cost, PyObject *limits, Py_ssize_t column) {
    if (!is_check(check) || PyTuple_GET_ITEM(check, CHECK_ID) != Py_None ||
        !is_same_cost(PyTuple_GET_ITEM(check, CHECK_COST), cost)) {
        return NULL;
    }
    PyObject *keys = PyTuple_GET_ITEM(check, CHECK_KEYS);
    PyObject *key = PyTuple_GET_SIZE(keys) == PyTuple_GET_SIZE(limits) ? PyTuple_GET_ITEM(keys, column) : NULL;
    if (key == NULL || !PyTuple_Check(key) || PyTuple_GET_SIZE(key) != KEY_FIELDS ||
        PyTuple_GET_ITEM(key, KEY_LIMIT) != PyTuple_GET_ITEM(limits, column)) {
        return NULL;
    }
    return PyTuple_GET_ITEM(key, KEY_IDENTITY);
}

static char *put_bytes(char *end, const char *bytes, Py_ssize_t length) {
    memcpy(end, bytes, (size_t)length);
    return end + length;
}

/* Enough for an int128 with its sign. */
enum { MAX_DIGITS = 40 };

static char *put_int(char *end, int128 value) {
    char digits[MAX_DIGITS], *first = digits + MAX_DIGITS;
    if (value < 0) *end++ = '-';
    if ((long long)value == value) { /* 64-bit division is much faster */
        unsigned long long rest = value < 0 ? -(unsigned long long)value : (unsigned long long)value;
        do {
            *--first = (char)('0' + rest % 10);
        } while (rest /= 10);
    } else {
        do {
            int digit = (int)(value % 10);
            *--first = (char)('0' + (digit < 0 ? -digit : digit));
        } while (value /= 10);
    }
    return put_bytes(end, first, digits + MAX_DIGITS - first);
}

/* "$<length>\r\n<prefix><identity>\r\n", or only its length if `end` is NULL. */
static Py_ssize_t put_key(char *end, PyObject *prefix, PyObject *identity) {
    Py_ssize_t prefix_length, identity_length;
    const char *prefix_bytes = plain_bytes(prefix, &prefix_length);
    const char *identity_bytes = plain_bytes(identity, &identity_length);
    if (prefix_bytes == NULL || identity_bytes == NULL) return -1;
    char head[MAX_DIGITS] = "$", *head_end = put_int(head + 1, prefix_length + identity_length);
    head_end = put_bytes(head_end, "\r\n", 2);
    if (end != NULL) {
        end = put_bytes(end, head, head_end - head);
        end = put_bytes(end, prefix_bytes, prefix_length);
        end = put_bytes(end, identity_bytes, identity_length);
        put_bytes(end, "\r\n", 2);
    }
    return head_end - head + prefix_length + identity_length + 2;
}

/* True if no earlier limit has the same prefix. */
static bool is_new_prefix(PyObject *prefixes, Py_ssize_t column) {
    PyObject *prefix = PyTuple_GET_ITEM(prefixes, column);
    for (Py_ssize_t other = 0; other < column; other++) {
        if (PyUnicode_Compare(PyTuple_GET_ITEM(prefixes, other), prefix) == 0) return false;
    }
    return true;
}

/* The number of bytes that the keys of all checks need; -1 if they are not the common case or an exception is set.
 * Creates no object that the garbage collector tracks, so that no finalizer can change the batch. */
static Py_ssize_t measure_keys(PyObject *checks, PyObject *limits, PyObject *prefixes, PyObject *identities,
                               bool *has_duplicates) {
    Py_ssize_t size = PyList_GET_SIZE(checks), total = 0;
    PyObject *first = PyList_GET_ITEM(checks, 0);
    if (!is_check(first)) return -1;
    for (Py_ssize_t column = 0; column < PyTuple_GET_SIZE(limits); column++) {
        PySet_Clear(identities);
        for (Py_ssize_t row = 0; row < size; row++) {
            PyObject *identity =
                find_identity(PyList_GET_ITEM(checks, row), PyTuple_GET_ITEM(first, CHECK_COST), limits, column);
            Py_ssize_t length = identity == NULL ? -1 : put_key(NULL, PyTuple_GET_ITEM(prefixes, column), identity);
            if (length < 0 || PySet_Add(identities, identity) < 0) return -1;
            total += length;
        }
        if (!is_new_prefix(prefixes, column)) return -1;
        *has_duplicates = *has_duplicates || PySet_GET_SIZE(identities) < size;
    }
    return total;
}

PyDoc_STRVAR(pack_keys_doc,
             "pack_keys(checks, limits, prefixes, /)\n--\n\n"
             "Return the number of keys of checks that differ only in their clients, the keys as RESP bulk strings,\n"
             "and whether any two are equal. Return None if the checks differ in limits, cost or id.");

static PyObject *pack_keys(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3 || !PyList_Check(args[0]) || !PyTuple_Check(args[1]) || !PyTuple_Check(args[2]) ||
        PyTuple_GET_SIZE(args[1]) != PyTuple_GET_SIZE(args[2])) {
        PyErr_SetString(PyExc_TypeError, "expected pack_keys(checks: list, limits: tuple, prefixes: tuple)");
        return NULL;
    }
    PyObject *checks = args[0], *limits = args[1], *prefixes = args[2], *identities = PySet_New(NULL);
    if (identities == NULL) return NULL;
    Py_ssize_t size = PyList_GET_SIZE(checks), width = PyTuple_GET_SIZE(limits), length = -1;
    bool has_duplicates = false;
    if (size && width && width <= MAX_BATCH_KEYS / size) {
        length = measure_keys(checks, limits, prefixes, identities, &has_duplicates);
    }
    PyObject *packed = length < 0 ? NULL : PyBytes_FromStringAndSize(NULL, length);
    if (packed != NULL) {
        char *end = PyBytes_AS_STRING(packed);
        for (Py_ssize_t row = 0; row < size; row++) {
            PyObject *keys = PyTuple_GET_ITEM(PyList_GET_ITEM(checks, row), CHECK_KEYS);
            for (Py_ssize_t column = 0; column < width; column++) {
                PyObject *identity = PyTuple_GET_ITEM(PyTuple_GET_ITEM(keys, column), KEY_IDENTITY);
                end += put_key(end, PyTuple_GET_ITEM(prefixes, column), identity);
            }
        }
    }
    Py_DECREF(identities);
    if (packed != NULL) {
        return Py_BuildValue("nNO", size * width, packed, has_duplicates ? Py_True : Py_False);
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* True for an int that a script could have replied: from 0 to the largest exact one. */
static bool is_script_int(PyObject *number) {
    int overflow;
    if (!PyLong_CheckExact(number)) return false;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    return !overflow && 0 <= value && value < EXACT;
}

/* A new reference to an int of a list; NULL, without an exception, if there is none. */
static PyObject *get_script_int(PyObject *list, Py_ssize_t index) {
    PyObject *number = index < PyList_GET_SIZE(list) ? PyList_GET_ITEM(list, index) : NULL;
    return number != NULL && is_script_int(number) ? Py_NewRef(number) : NULL;
}

/* The verdicts of limits that neither deny nor delay; NULL, with or without an exception, if they cannot be made. */
static PyObject *read_verdicts(PyObject *numbers, Py_ssize_t start, Py_ssize_t count) {
    PyObject *verdicts = PyTuple_New(count);
    for (Py_ssize_t index = 0; verdicts != NULL && index < count; index++) {
        PyObject *remaining = get_script_int(numbers, start + 2 * index);
        PyObject *reset_us = get_script_int(numbers, start + 2 * index + 1);
        PyObject *verdict = remaining == NULL || reset_us == NULL ? NULL : PyTuple_New(VERDICT_FIELDS);
        if (verdict == NULL) {
            Py_XDECREF(remaining);
            Py_XDECREF(reset_us);
            Py_CLEAR(verdicts);
            break;
        }
        PyTuple_SET_ITEM(verdict, 0, remaining);
        PyTuple_SET_ITEM(verdict, 1, PyLong_FromLong(0));
        PyTuple_SET_ITEM(verdict, 2, reset_us);
        PyTuple_SET_ITEM(verdict, 3, PyLong_FromLong(0));
        PyTuple_SET_ITEM(verdicts, index, verdict);
    }
    return verdicts;
}

/* True if a reply has the shape for a batch in which no request is denied, delayed or close to a limit. */
static bool is_allowed_reply(PyObject *reply) {
    if (!PyList_CheckExact(reply) || PyList_GET_SIZE(reply) != REPLY_FIELDS ||
        !is_script_int(PyList_GET_ITEM(reply, REPLY_NOW))) {
        return false;
    }
    for (Py_ssize_t index = REPLY_NUMBERS; index < REPLY_FIELDS; index++) {
        PyObject *part = PyList_GET_ITEM(reply, index);
        if (!PyList_CheckExact(part) || (index != REPLY_NUMBERS && PyList_GET_SIZE(part))) return false;
    }
    return true;
}

PyDoc_STRVAR(decode_allowed_doc,
             "decode_allowed(checks, reply, /)\n--\n\n"
             "Return the Decisions on a batch of which every check is allowed; None for any other reply.");

static PyObject *decode_allowed(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    const ModuleState *module = PyModule_GetState(self);
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "expected decode_allowed(checks, reply)");
        return NULL;
    }
    PyObject *checks = args[0], *reply = args[1];
    if (!PyList_CheckExact(checks) || !is_allowed_reply(reply)) Py_RETURN_NONE;
    PyObject *now_us = PyList_GET_ITEM(reply, REPLY_NOW), *numbers = PyList_GET_ITEM(reply, REPLY_NUMBERS);
    Py_ssize_t start = 0;
    PyObject *decisions = PyList_New(0);
    for (Py_ssize_t row = 0; decisions != NULL && row < PyList_GET_SIZE(checks); row++) {
        PyObject *check = PyList_GET_ITEM(checks, row), *verdicts = NULL, *decision = NULL;
        if (is_check(check)) {
            Py_ssize_t count = PyTuple_GET_SIZE(PyTuple_GET_ITEM(check, CHECK_KEYS));
            verdicts = read_verdicts(numbers, start, count);
            start += 2 * count;
        }
        if (verdicts != NULL) {
            decision = new_decision(module, true, PyTuple_GET_ITEM(check, CHECK_KEYS), verdicts,
                                    PyTuple_GET_ITEM(check, CHECK_ID), now_us, PyTuple_GET_ITEM(check, CHECK_COST));
        }
        if (decision == NULL || PyList_Append(decisions, decision) < 0) Py_CLEAR(decisions);
        Py_XDECREF(verdicts);
        Py_XDECREF(decision);
    }
    if (decisions != NULL && start == PyList_GET_SIZE(numbers)) return decisions;
    Py_XDECREF(decisions);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* -- Regions: translate_check, replace_fields, add_usage and finish_check ------------------------------------------ */

PyDoc_STRVAR(replace_fields_doc,
             "replace_fields(record, start, /, *values)\n--\n\n"
             "Return a copy of a named tuple with other values for the fields from `start` on.");

static PyObject *replace_fields(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs < 2 || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected replace_fields(record, start, *values)");
        return NULL;
    }
    PyObject *record = args[0];
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), size = PyTuple_GET_SIZE(record), count = nargs - 2;
    if (start == -1 && PyErr_Occurred()) return NULL;
    if (start < 0 || start > size || count > size - start) {
        PyErr_Format(PyExc_IndexError, "%zd fields from %zd on of a tuple of %zd", count, start, size);
        return NULL;
    }
    PyObject *copy = Py_TYPE(record)->tp_alloc(Py_TYPE(record), size);
    for (Py_ssize_t index = 0; copy != NULL && index < size; index++) {
        bool is_kept = index < start || index >= start + count;
        PyObject *value = is_kept ? PyTuple_GET_ITEM(record, index) : args[2 + index - start];
        PyTuple_SET_ITEM(copy, index, Py_NewRef(value));
    }
    return copy;
}

PyDoc_STRVAR(translate_check_doc,
             "translate_check(check, counted, /)\n--\n\n"
             "Return the check on the limits to which a dict maps those of its keys. Return None if one is not in it.");

/* A copy of a named tuple with another first field, to which it takes the reference; NULL with an exception. */
static PyObject *with_first(PyObject *record, PyObject *first) {
    Py_ssize_t size = PyTuple_GET_SIZE(record);
    PyObject *copy = Py_TYPE(record)->tp_alloc(Py_TYPE(record), size);
    if (copy == NULL) {
        Py_DECREF(first);
        return NULL;
    }
    PyTuple_SET_ITEM(copy, 0, first);
    for (Py_ssize_t index = 1; index < size; index++) {
        PyTuple_SET_ITEM(copy, index, Py_NewRef(PyTuple_GET_ITEM(record, index)));
    }
    return copy;
}

static PyObject *translate_check(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !is_check(args[0]) || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected translate_check(check: Check, counted: dict)");
        return NULL;
    }
    PyObject *check = args[0], *keys = PyTuple_GET_ITEM(check, CHECK_KEYS);
    Py_ssize_t size = PyTuple_GET_SIZE(keys);
    PyObject *translated = PyTuple_New(size);
    bool has_changed = false;
    for (Py_ssize_t index = 0; translated != NULL && index < size; index++) {
        PyObject *key = PyTuple_GET_ITEM(keys, index);
        bool is_key = PyTuple_Check(key) && PyTuple_GET_SIZE(key) == KEY_FIELDS;
        PyObject *limit = is_key ? PyTuple_GET_ITEM(key, KEY_LIMIT) : NULL;
        PyObject *counted = is_key ? PyDict_GetItemWithError(args[1], limit) : NULL;
        if (counted == NULL) {
            Py_DECREF(translated);
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        }
        has_changed = has_changed || counted != limit;
        key = counted == limit ? Py_NewRef(key) : with_first(key, Py_NewRef(counted));
        if (key == NULL) {
            Py_CLEAR(translated);
            break;
        }
        PyTuple_SET_ITEM(translated, index, key);
    }
    if (translated == NULL || has_changed) return translated == NULL ? NULL : with_first(check, translated);
    Py_DECREF(translated);
    return Py_NewRef(check);
}

/* Replace a number in a list, whose old one is an int; false with an exception. */
static bool set_number(PyObject *list, Py_ssize_t index, int128 value) {
    PyObject *number = new_int(value);
    return number != NULL && PyList_SetItem(list, index, number) == 0;
}

enum { SLOT_NUMBER, SLOT_START, SLOT_END, SLOT_ADMITTED, SLOT_FIELDS };

PyDoc_STRVAR(add_usage_doc,
             "add_usage(open_slots, key, cost, at_us, /)\n--\n\n"
             "Add an admission to the slot that is open for a key; False if none is open at that time.");

/* Add to a slot; false, without an exception, if it is not open at that time. Runs no Python code. */
static bool add_to_slot(PyObject *slot, PyObject *cost_object, int128 at_us) {
    int128 cost, start, end, admitted;
    if (!PyList_CheckExact(slot) || PyList_GET_SIZE(slot) != SLOT_FIELDS || !read_int(cost_object, &cost) ||
        !read_int(PyList_GET_ITEM(slot, SLOT_START), &start) || !read_int(PyList_GET_ITEM(slot, SLOT_END), &end) ||
        at_us < start || at_us >= end || !read_int(PyList_GET_ITEM(slot, SLOT_ADMITTED), &admitted) || cost < 0 ||
        cost > MAX_MAGNITUDE || admitted < 0 || admitted > MAX_MAGNITUDE) {
        return false;
    }
    return set_number(slot, SLOT_ADMITTED, admitted + cost);
}

/* No Python code runs between the lookup and the end, so that no other thread sees a slot that is half changed. */
static PyObject *add_usage(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4 || !PyDict_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected add_usage(open_slots: dict, key, cost: int, at_us: int)");
        return NULL;
    }
#ifdef Py_GIL_DISABLED
    Py_RETURN_FALSE;
#else
    int128 at_us;
    if (!read_int(args[3], &at_us)) Py_RETURN_FALSE;
    PyObject *slot = PyDict_GetItemWithError(args[0], args[1]);
    if (slot == NULL && PyErr_Occurred()) return NULL;
    return PyBool_FromLong(slot != NULL && add_to_slot(slot, args[2], at_us));
#endif
}

enum { DEMAND_SPENT, DEMAND_LEFT, DEMAND_HOME_LEFT, DEMAND_UNTIL, DEMAND_CAPACITY, DEMAND_FIELDS };

/* Count an admitted request in a KeyDemand; return the verdict on the caller's limit. NULL, without an exception, for
 * what is not the common case. */
static PyObject *record_demand(PyObject *demand, PyObject *verdict, PyObject *cost_object, int128 at_us) {
    int128 cost, left, retry_us, reset_us, numbers[DEMAND_FIELDS];
    if (!PyList_Check(demand) || PyList_GET_SIZE(demand) != DEMAND_FIELDS || !read_int(cost_object, &cost) ||
        !PyTuple_Check(verdict) || PyTuple_GET_SIZE(verdict) != VERDICT_FIELDS ||
        !read_int(PyTuple_GET_ITEM(verdict, 0), &left) || !read_int(PyTuple_GET_ITEM(verdict, 1), &retry_us) ||
        !read_int(PyTuple_GET_ITEM(verdict, 2), &reset_us) || retry_us || cost < 0 || cost > MAX_MAGNITUDE) {
        return NULL;
    }
    for (Py_ssize_t index = 0; index < DEMAND_FIELDS; index++) {
        if (!read_int(PyList_GET_ITEM(demand, index), &numbers[index])) return NULL;
        if (numbers[index] < 0 || numbers[index] > MAX_MAGNITUDE) return NULL;
    }
    if (!set_number(demand, DEMAND_SPENT, numbers[DEMAND_SPENT] + cost) || !set_number(demand, DEMAND_LEFT, left)) {
        return NULL;
    }
    int128 wait_us = numbers[DEMAND_UNTIL] - at_us, total = left + numbers[DEMAND_HOME_LEFT];
    int128 values[VERDICT_FIELDS] = {total < numbers[DEMAND_CAPACITY] ? total : numbers[DEMAND_CAPACITY], 0,
                                     wait_us > reset_us ? wait_us : reset_us, 0};
    return new_int_tuple(values, VERDICT_FIELDS);
}

PyDoc_STRVAR(finish_check_doc,
             "finish_check(open_slots, demands, check, counted, decision, /)\n--\n\n"
             "Return the decision on a check, given that on the keys which its region counts, and record that it was\n"
             "admitted. Return None, with nothing changed, for a denial, and if more than one key is to be recorded.");

/* True for the mode; false for another one, and without an exception. */
static bool is_mode(PyObject *mode, const char *name) {
    return PyUnicode_CompareWithASCIIString(mode, name) == 0;
}

/* The index of the only key whose use is recorded; -1 if there is none, -2 for several, or with an exception. */
static Py_ssize_t find_recorded(const ModuleState *module, PyObject *keys, PyObject *counted, bool *is_reserved) {
    Py_ssize_t found = -1;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(keys); index++) {
        PyObject *key = PyTuple_GET_ITEM(keys, index), *other = PyTuple_GET_ITEM(counted, index);
        if (!PyTuple_Check(key) || PyTuple_GET_SIZE(key) != KEY_FIELDS || !PyTuple_Check(other)) return -2;
        if (key == other) continue; /* regional */
        PyObject *mode = PyObject_GetAttr(PyTuple_GET_ITEM(key, KEY_LIMIT), module->region);
        if (mode == NULL || !PyUnicode_Check(mode)) {
            Py_XDECREF(mode);
            return -2;
        }
        *is_reserved = is_mode(mode, "reserved");
        if (*is_reserved || is_mode(mode, "reconciled")) found = found == -1 ? index : -2;
        Py_DECREF(mode);
        if (found == -2) break;
    }
    return found;
}

static PyObject *finish_check(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5 || !PyDict_Check(args[0]) || !PyDict_Check(args[1]) || !is_check(args[2]) || !is_check(args[3]) ||
        !PyTuple_Check(args[4]) || PyTuple_GET_SIZE(args[4]) != DECISION_FIELDS) {
        PyErr_SetString(PyExc_TypeError,
                        "expected finish_check(open_slots: dict, demands: dict, check, counted, decision)");
        return NULL;
    }
#ifdef Py_GIL_DISABLED
    Py_RETURN_NONE;
#else
    PyObject *decision = args[4], *verdicts = PyTuple_GET_ITEM(decision, DECISION_VERDICTS);
    PyObject *keys = PyTuple_GET_ITEM(args[2], CHECK_KEYS), *cost = PyTuple_GET_ITEM(args[2], CHECK_COST);
    PyObject *counted = PyTuple_GET_ITEM(args[3], CHECK_KEYS);
    int128 at_us;
    bool is_reserved = false;
    if (PyTuple_GET_ITEM(decision, DECISION_ALLOWED) != Py_True ||
        PyTuple_GET_ITEM(decision, DECISION_DEGRADED) != Py_None || !PyTuple_Check(verdicts) ||
        PyTuple_GET_SIZE(verdicts) != PyTuple_GET_SIZE(keys) ||
        PyTuple_GET_SIZE(counted) != PyTuple_GET_SIZE(keys) ||
        !read_int(PyTuple_GET_ITEM(decision, DECISION_AT_US), &at_us)) {
        Py_RETURN_NONE;
    }
    Py_ssize_t index = find_recorded(PyModule_GetState(self), keys, counted, &is_reserved);
    if (index == -2) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    PyObject *verdict = NULL;
    if (index >= 0) {
        /* No Python code runs after the lookup, so that no other thread sees a record that is half changed. */
        PyObject *record = PyDict_GetItemWithError(args[is_reserved], PyTuple_GET_ITEM(counted, index));
        bool is_recorded = record != NULL && !is_reserved && add_to_slot(record, cost, at_us);
        if (record != NULL && is_reserved) {
            verdict = record_demand(record, PyTuple_GET_ITEM(verdicts, index), cost, at_us);
            is_recorded = verdict != NULL;
        }
        if (!is_recorded) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    PyObject *finished = Py_TYPE(decision)->tp_alloc(Py_TYPE(decision), DECISION_FIELDS);
    PyObject *own = NULL;
    if (finished != NULL) own = verdict == NULL ? Py_NewRef(verdicts) : PyTuple_New(PyTuple_GET_SIZE(verdicts));
    if (own == NULL) {
        Py_XDECREF(finished);
        Py_XDECREF(verdict);
        return NULL;
    }
    for (Py_ssize_t row = 0; verdict != NULL && row < PyTuple_GET_SIZE(own); row++) {
        PyTuple_SET_ITEM(own, row, row == index ? verdict : Py_NewRef(PyTuple_GET_ITEM(verdicts, row)));
    }
    for (Py_ssize_t field = 0; field < DECISION_FIELDS; field++) {
        PyObject *value = field == DECISION_KEYS ? keys : PyTuple_GET_ITEM(decision, field);
        PyTuple_SET_ITEM(finished, field, field == DECISION_VERDICTS ? own : Py_NewRef(value));
    }
    return finished;
#endif
}

/* -- HTTP: RateLimitHeaders ---------------------------------------------------------------------------------------- */

static const int128 SECOND_US = 1000000;

/* The same as LARGEST in headers.py. */
static const int128 LARGEST = 999999999999999;

enum { MAX_HEADERS = 5 };

/* A limit as the header fields describe it. */
typedef struct {
    int128 refill_us, cost, quota, window;
    bool ends_at_once;
} HeaderLimit;

typedef struct {
    PyObject_HEAD
    PyObject *names, *quotas, *policy;
    HeaderLimit *limits;
    int has_x_ratelimit, has_ratelimit;
} Headers;

static bool read_header_limit(PyObject *name, PyObject *refill_us, PyObject *cost, PyObject *pace, HeaderLimit *limit) {
    if (!PyBytes_CheckExact(name) || !read_int(refill_us, &limit->refill_us) || !read_int(cost, &limit->cost) ||
        limit->cost < 0 || !PyTuple_Check(pace) || PyTuple_GET_SIZE(pace) != 3 ||
        !read_int(PyTuple_GET_ITEM(pace, 0), &limit->quota) || limit->quota < 1 || limit->quota > LARGEST ||
        !read_int(PyTuple_GET_ITEM(pace, 1), &limit->window) || limit->window < 0 || limit->window > LARGEST) {
        return false;
    }
    limit->ends_at_once = PyTuple_GET_ITEM(pace, 2) == Py_True;
    return true;
}

static void headers_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Headers *headers = (Headers *)self;
    Py_XDECREF(headers->names);
    Py_XDECREF(headers->quotas);
    Py_XDECREF(headers->policy);
    PyMem_Free(headers->limits);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *headers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"names",  "quotas",      "refill_us", "costs", "paces",
                               "policy", "x_ratelimit", "ratelimit", NULL};
    PyObject *names, *quotas, *refill_us, *costs, *paces, *policy;
    int has_x_ratelimit, has_ratelimit;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!O!O!pp", keywords, &PyTuple_Type, &names, &PyTuple_Type,
                                     &quotas, &PyTuple_Type, &refill_us, &PyTuple_Type, &costs, &PyTuple_Type, &paces,
                                     &PyTuple_Type, &policy, &has_x_ratelimit, &has_ratelimit)) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(names);
    if (PyTuple_GET_SIZE(quotas) != count || PyTuple_GET_SIZE(refill_us) != count ||
        PyTuple_GET_SIZE(costs) != count || PyTuple_GET_SIZE(paces) != count) {
        PyErr_SetString(PyExc_ValueError, "names, quotas, refill_us, costs and paces have different lengths");
        return NULL;
    }
    Headers *self = (Headers *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->names = Py_NewRef(names);
    self->quotas = Py_NewRef(quotas);
    self->policy = Py_NewRef(policy);
    self->has_x_ratelimit = has_x_ratelimit;
    self->has_ratelimit = has_ratelimit;
    self->limits = PyMem_Calloc(count ? (size_t)count : 1, sizeof(HeaderLimit));
    if (self->limits == NULL) PyErr_NoMemory();
    for (Py_ssize_t index = 0; index < count && !PyErr_Occurred(); index++) {
        if (!read_header_limit(PyTuple_GET_ITEM(names, index), PyTuple_GET_ITEM(refill_us, index),
                               PyTuple_GET_ITEM(costs, index), PyTuple_GET_ITEM(paces, index), &self->limits[index])) {
            PyErr_SetString(PyExc_TypeError, "expected names: bytes, refill_us and costs: int, paces: Pace");
        }
    }
    if (PyErr_Occurred()) Py_CLEAR(self);
    return (PyObject *)self;
}

static bool read_verdict(PyObject *tuple, Verdict *verdict) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != VERDICT_FIELDS ||
        !read_int(PyTuple_GET_ITEM(tuple, 0), &verdict->remaining) ||
        !read_int(PyTuple_GET_ITEM(tuple, 1), &verdict->retry_us) ||
        !read_int(PyTuple_GET_ITEM(tuple, 2), &verdict->reset_us)) {
        PyErr_Format(PyExc_TypeError, "%R is not a verdict", tuple);
        return false;
    }
    return true;
}

/* The number of further requests of the same cost, or a rank below 0 if the limit denied; and the time to wait. */
static int128 rank_limit(const HeaderLimit *limit, const Verdict *verdict, int128 *wait_us) {
    const int128 most = ((int128)1 << 126) - 1;
    const int128 room = limit->cost ? verdict->remaining / limit->cost : most;
    *wait_us = verdict->reset_us;
    if (verdict->remaining && !verdict->retry_us) return room;
    if (verdict->retry_us == NEVER) return -most;
    if (verdict->retry_us) {
        *wait_us = verdict->retry_us;
        return -verdict->retry_us;
    }
    if (verdict->reset_us >= limit->refill_us) *wait_us = verdict->reset_us - limit->refill_us;
    return room;
}

/* `t` of RateLimit: clients may spread r over t seconds, and r/t must not exceed the rate of the policy. */
static int128 effective_window(const HeaderLimit *limit, int128 remaining, int128 wait_us) {
    int128 seconds = ceil_div(wait_us, SECOND_US);
    if (remaining > 0 && limit->window && !(limit->ends_at_once && wait_us)) {
        seconds = larger(seconds, ceil_div(remaining * limit->window, limit->quota));
    }
    return smaller(seconds, LARGEST);
}

static PyObject *new_header(PyObject *name, const char *value, Py_ssize_t length) {
    return Py_BuildValue("Oy#", name, value, length);
}

static PyObject *new_int_header(PyObject *name, int128 value) {
    char digits[MAX_DIGITS];
    return new_header(name, digits, put_int(digits, value) - digits);
}

/* Fills in the header fields, which are new references. Returns how many, or -1 with an exception. `text` has room for
 * `max_text_bytes`. */
static int format_headers(const Headers *self, const ModuleState *module, PyObject *verdicts, int128 now_us, char *text,
                          PyObject **headers) {
    char *end = text;
    int128 least = 0;
    Verdict verdict, tightest_verdict = {0, 0, 0, 0};
    Py_ssize_t tightest = 0;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->names); index++) {
        if (!read_verdict(PySequence_Fast_GET_ITEM(verdicts, index), &verdict)) return -1;
        const HeaderLimit *limit = &self->limits[index];
        int128 wait_us, room = rank_limit(limit, &verdict, &wait_us), remaining = smaller(verdict.remaining, LARGEST);
        if (index == 0 || room < least || (room == least && verdict.reset_us > tightest_verdict.reset_us)) {
            least = room;
            tightest = index;
            tightest_verdict = verdict;
        }
        PyObject *name = PyTuple_GET_ITEM(self->names, index);
        end = put_bytes(end, ", ", index ? 2 : 0);
        end = put_bytes(end, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name));
        end = put_int(put_bytes(end, ";r=", 3), remaining);
        end = put_int(put_bytes(end, ";t=", 3), effective_window(limit, remaining, wait_us));
    }
    int count = 0;
    if (self->has_x_ratelimit) {
        int128 reset_s = ceil_div(now_us + tightest_verdict.reset_us, SECOND_US);
        headers[count++] = Py_NewRef(PyTuple_GET_ITEM(self->quotas, tightest));
        headers[count++] = new_int_header(module->remaining_name, tightest_verdict.remaining);
        headers[count++] = new_int_header(module->reset_name, reset_s);
    }
    if (self->has_ratelimit) {
        headers[count++] = Py_NewRef(self->policy);
        headers[count++] = new_header(module->ratelimit_name, text, end - text);
    }
    return PyErr_Occurred() ? -1 : count;
}

static size_t max_text_bytes(const Headers *self) {
    size_t most = (size_t)PyTuple_GET_SIZE(self->names) * (2 * MAX_DIGITS + strlen(", ;r=;t="));
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->names); index++) {
        most += (size_t)PyBytes_GET_SIZE(PyTuple_GET_ITEM(self->names, index));
    }
    return most;
}

PyDoc_STRVAR(headers_doc, "headers(verdicts, now_us, /)\n--\n\nThe header fields of a response.");

static PyObject *headers_headers(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    const Headers *self = (const Headers *)object;
    int128 now_us;
    if (nargs != 2 || !read_int(args[1], &now_us)) {
        PyErr_SetString(PyExc_TypeError, "expected headers(verdicts, now_us: int)");
        return NULL;
    }
    PyObject *verdicts = PySequence_Fast(args[0], "verdicts must be a sequence");
    if (verdicts == NULL) return NULL;
    Py_ssize_t given = PySequence_Fast_GET_SIZE(verdicts), expected = PyTuple_GET_SIZE(self->names);
    char small[1024], *large = NULL;
    PyObject *headers[MAX_HEADERS] = {NULL}, *list = NULL;
    int count = 0;
    if (given > 0 && given != expected) {
        PyErr_Format(PyExc_IndexError, "got %zd verdicts for %zd limits", given, expected);
        count = -1;
    } else if (given > 0 && (self->has_x_ratelimit || self->has_ratelimit)) {
        size_t size = max_text_bytes(self);
        large = size > sizeof(small) ? PyMem_Malloc(size) : NULL;
        if (size > sizeof(small) && large == NULL) {
            PyErr_NoMemory();
            count = -1;
        } else {
            count = format_headers(self, PyType_GetModuleState(Py_TYPE(object)), verdicts, now_us,
                                   large == NULL ? small : large, headers);
        }
    }
    PyMem_Free(large);
    Py_DECREF(verdicts);
    if (count >= 0 && (list = PyList_New(count)) != NULL) {
        for (int index = 0; index < count; index++) {
            PyList_SET_ITEM(list, index, headers[index]);
        }
        return list;
    }
    for (int index = 0; index < MAX_HEADERS; index++) {
        Py_XDECREF(headers[index]);
    }
    return NULL;
}

/* -- Module -------------------------------------------------------------------------------------------------------- */

static PyType_Slot METER_SLOTS[] = {
    {Py_tp_new, meter_new},
    {Py_tp_dealloc, meter_dealloc},
    {Py_tp_doc, "Meter(limit, states)\n--\n\nThe numbers of a limit and its counters, for `charge`."},
    {0, NULL},
};

static PyType_Spec METER = {
    .name = "headgate._native.Meter",
    .basicsize = sizeof(Meter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = METER_SLOTS,
};

static PyMethodDef HEADERS_METHODS[] = {
    {"headers", (PyCFunction)(void (*)(void))headers_headers, METH_FASTCALL, headers_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot HEADERS_SLOTS[] = {
    {Py_tp_new, headers_new},
    {Py_tp_dealloc, headers_dealloc},
    {Py_tp_methods, HEADERS_METHODS},
    {Py_tp_doc, "The RateLimit header fields of requests to which the same limits apply at the same costs."},
    {0, NULL},
};

static PyType_Spec HEADERS = {
    .name = "headgate._native.RateLimitHeaders",
    .basicsize = sizeof(Headers),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = HEADERS_SLOTS,
};

static PyTypeObject *import_class(const char *module_name, const char *name) {
    PyObject *module = PyImport_ImportModule(module_name);
    PyObject *type = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    Py_XDECREF(module);
    return (PyTypeObject *)type;
}

static int exec_module(PyObject *self) {
    ModuleState *module = PyModule_GetState(self);
    if ((module->key_type = import_class("headgate.keys", "Key")) == NULL ||
        (module->limit_type = import_class("headgate.limits", "Limit")) == NULL ||
        (module->decision_type = import_class("headgate.decisions", "Decision")) == NULL ||
        (module->meter_type = (PyTypeObject *)PyType_FromModuleAndSpec(self, &METER, NULL)) == NULL ||
        (module->headers_type = (PyTypeObject *)PyType_FromModuleAndSpec(self, &HEADERS, NULL)) == NULL ||
        (module->space = PyUnicode_InternFromString("space")) == NULL ||
        (module->region = PyUnicode_InternFromString("region")) == NULL ||
        (module->remaining_name = PyBytes_FromString("x-ratelimit-remaining")) == NULL ||
        (module->reset_name = PyBytes_FromString("x-ratelimit-reset")) == NULL ||
        (module->ratelimit_name = PyBytes_FromString("ratelimit")) == NULL ||
        PyModule_AddType(self, module->meter_type) < 0 || PyModule_AddType(self, module->headers_type) < 0) {
        return -1;
    }
    PyObject *names = PyList_New(0);
    for (int index = 0; names != NULL && index < ALGORITHM_COUNT; index++) {
        PyObject *name = PyUnicode_FromString(ALGORITHMS[index].name);
        if (name == NULL || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    int result = names == NULL ? -1 : PyModule_AddObjectRef(self, "ALGORITHMS", names);
    Py_XDECREF(names);
    return result;
}

static int traverse_module(PyObject *self, visitproc visit, void *arg) {
    ModuleState *module = PyModule_GetState(self);
    for (size_t index = 0; index < sizeof(*module) / sizeof(PyObject *); index++) {
        Py_VISIT(module->references[index]);
    }
    return 0;
}

static int clear_module(PyObject *self) {
    ModuleState *module = PyModule_GetState(self);
    for (size_t index = 0; index < sizeof(*module) / sizeof(PyObject *); index++) {
        Py_CLEAR(module->references[index]);
    }
    return 0;
}

static void free_module(void *self) {
    clear_module(self);
}

static PyMethodDef METHODS[] = {
    {"charge", (PyCFunction)(void (*)(void))charge, METH_FASTCALL, charge_doc},
    {"admit", (PyCFunction)(void (*)(void))admit, METH_FASTCALL, admit_doc},
    {"pack_keys", (PyCFunction)(void (*)(void))pack_keys, METH_FASTCALL, pack_keys_doc},
    {"decode_allowed", (PyCFunction)(void (*)(void))decode_allowed, METH_FASTCALL, decode_allowed_doc},
    {"translate_check", (PyCFunction)(void (*)(void))translate_check, METH_FASTCALL, translate_check_doc},
    {"add_usage", (PyCFunction)(void (*)(void))add_usage, METH_FASTCALL, add_usage_doc},
    {"finish_check", (PyCFunction)(void (*)(void))finish_check, METH_FASTCALL, finish_check_doc},
    {"replace_fields", (PyCFunction)(void (*)(void))replace_fields, METH_FASTCALL, replace_fields_doc},
    {NULL, NULL, 0, NULL},
};

/* All state is in the module, so each interpreter may have its own. Without a GIL the memory store is always busy and
 * `charge` returns None; the other functions change nothing that is shared. */
static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, exec_module},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "headgate._native",
    .m_doc = "Optional speedups; see headgate.speedups.",
    .m_size = sizeof(ModuleState),
    .m_methods = METHODS,
    .m_slots = SLOTS,
    .m_traverse = traverse_module,
    .m_clear = clear_module,
    .m_free = free_module,
};

PyMODINIT_FUNC PyInit__native(void) {
    return PyModuleDef_Init(&MODULE);
}
