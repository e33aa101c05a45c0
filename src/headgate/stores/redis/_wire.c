/* Batches as Redis gets and answers them: the keys of checks that are all alike, packed, and what the usual reply tells
 * each. Mirrors `plain_pack_keys` in wire.py and `plain_answers` in replies.py; whatever is unusual is left to Python,
 * by answering None. */
#include "../../_decision.h"

/* The places of what is needed in a Check, a Key and a reply. */
enum { KEYS = 0, COST = 1, LEASE = 2, CHECKED = 3 };
enum { LIMIT = 0, IDENTITY = 2, KEYED = 3 };
enum { NOW = 0, TOLD = 1, UNUSUAL = 2, AGAINS = 3, REPLIED = 4 };

/* Above this, a batch is put together by Python: a length needs no more digits, and a sum of lengths always fits. */
enum { LONGEST = 99999, MOST_KEYS = 1 << 16 };

/* As in limits.py. */
#define EXACT (1LL << 53)

typedef struct {
    PyTypeObject *decision_type;
    PyObject *zero;
} Names;

/* -- What goes out ------------------------------------------------------------------------------------------------- */

/* Whether two costs are the same, by a comparison that runs no code of Python's: one could change the requests while
 * they are packed. Costs of other types are left to Python, by answering no. */
static bool
is_same_cost(PyObject *one, PyObject *other)
{
    if (one == other) {
        return true;
    }
    if (PyLong_CheckExact(one) && PyLong_CheckExact(other)) {
        return PyObject_RichCompareBool(one, other, Py_EQ) == 1;
    }
    if (!PyTuple_CheckExact(one) || !PyTuple_CheckExact(other) || PyTuple_GET_SIZE(one) != PyTuple_GET_SIZE(other)) {
        return false;
    }
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(one); index++) {
        PyObject *its = PyTuple_GET_ITEM(one, index), *others = PyTuple_GET_ITEM(other, index);
        if (!PyLong_CheckExact(its) || !PyLong_CheckExact(others) ||
            PyObject_RichCompareBool(its, others, Py_EQ) != 1) {
            return false;
        }
    }
    return true;
}

/* The keys of a request; NULL, without an exception, if it is not like the first one: in its limits, cost and lease. */
static PyObject *
keys_of(PyObject *check, PyObject *cost, PyObject *limits)
{
    if (!PyTuple_Check(check) || PyTuple_GET_SIZE(check) != CHECKED) {
        return NULL;
    }
    PyObject *keys = PyTuple_GET_ITEM(check, KEYS), *its_cost = PyTuple_GET_ITEM(check, COST);
    if (PyTuple_GET_ITEM(check, LEASE) != Py_None || !PyTuple_Check(keys) ||
        PyTuple_GET_SIZE(keys) != PyTuple_GET_SIZE(limits)) {
        return NULL;
    }
    return is_same_cost(its_cost, cost) ? keys : NULL;
}

/* Whether a text is stored as it is: without braces, which a cluster takes for hash tags, and within ASCII. */
static bool
is_plain(PyObject *text)
{
    if (!PyUnicode_CheckExact(text) || !PyUnicode_IS_ASCII(text) || PyUnicode_GET_LENGTH(text) > LONGEST / 2) {
        return false;
    }
    size_t length = (size_t)PyUnicode_GET_LENGTH(text);
    return !memchr(PyUnicode_DATA(text), '{', length) && !memchr(PyUnicode_DATA(text), '}', length);
}

/* The identity of a key of that limit; NULL, without an exception, if it is of another, or not plain. */
static PyObject *
identity_of(PyObject *key, PyObject *limit)
{
    if (!PyTuple_Check(key) || PyTuple_GET_SIZE(key) != KEYED || PyTuple_GET_ITEM(key, LIMIT) != limit) {
        return NULL;
    }
    PyObject *identity = PyTuple_GET_ITEM(key, IDENTITY);
    return is_plain(identity) ? identity : NULL;
}

static char *
put(char *at, const char *bytes, Py_ssize_t length)
{
    memcpy(at, bytes, (size_t)length);
    return at + length;
}

/* "$<length>\r\n<head><identity>\r\n" */
static char *
put_key(char *at, PyObject *head, PyObject *identity)
{
    Py_ssize_t length = PyUnicode_GET_LENGTH(head) + PyUnicode_GET_LENGTH(identity);
    char digits[5], *digit = digits + sizeof(digits);
    for (Py_ssize_t rest = length; rest || digit == digits + sizeof(digits); rest /= 10) {
        *--digit = (char)('0' + rest % 10);
    }
    *at++ = '$';
    at = put(at, digit, digits + sizeof(digits) - digit);
    at = put(at, "\r\n", 2);
    at = put(at, PyUnicode_DATA(head), PyUnicode_GET_LENGTH(head));
    at = put(at, PyUnicode_DATA(identity), PyUnicode_GET_LENGTH(identity));
    return put(at, "\r\n", 2);
}

/* Whether keys of this limit are stored as they are, and none of them can be one of a limit before it. */
static bool
is_plain_head(PyObject *heads, Py_ssize_t column)
{
    PyObject *head = PyTuple_GET_ITEM(heads, column);
    if (!is_plain(head)) {
        return false;
    }
    for (Py_ssize_t other = 0; other < column; other++) {
        if (PyUnicode_Compare(PyTuple_GET_ITEM(heads, other), head) == 0) {
            return false;
        }
    }
    return true;
}

/* Whether an identity was seen before in the column of its limit. The table is of a size that is a power of two, and
 * never full. */
static bool
was_seen(PyObject **table, size_t size, PyObject *identity)
{
    size_t place = (size_t)PyObject_Hash(identity);
    for (;; place++) {
        PyObject *other = table[place & (size - 1)];
        if (other == NULL) {
            table[place & (size - 1)] = identity;
            return false;
        }
        if (other == identity || PyUnicode_Compare(other, identity) == 0) {
            return true;
        }
    }
}

PyDoc_STRVAR(pack_keys_doc,
             "pack_keys(checks, limits, heads, /)\n--\n\n"
             "How many keys checks have that are all of these limits, and otherwise like the first; the keys, packed;\n"
             "and whether any two are the same. None if the checks differ in more than whom they are of.");

static PyObject *
pack_keys(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t number)
{
    if (number != 3 || !PyList_Check(args[0]) || !PyTuple_Check(args[1]) || !PyTuple_Check(args[2]) ||
        PyTuple_GET_SIZE(args[1]) != PyTuple_GET_SIZE(args[2])) {
        PyErr_SetString(PyExc_TypeError, "pack_keys(checks: list, limits: tuple, heads: tuple of as many)");
        return NULL;
    }
    PyObject *checks = args[0], *limits = args[1], *heads = args[2];
    Py_ssize_t size = PyList_GET_SIZE(checks), width = PyTuple_GET_SIZE(limits), length = 0;
    PyObject *first = size ? PyList_GET_ITEM(checks, 0) : NULL;
    if (first == NULL || !width || width > MOST_KEYS / size || !PyTuple_Check(first) ||
        PyTuple_GET_SIZE(first) != CHECKED) {
        Py_RETURN_NONE;
    }
    for (Py_ssize_t column = 0; column < width; column++) {
        if (!is_plain_head(heads, column)) {
            Py_RETURN_NONE;
        }
        Py_ssize_t head = PyUnicode_GET_LENGTH(PyTuple_GET_ITEM(heads, column));
        for (Py_ssize_t row = 0; row < size; row++) {
            PyObject *keys = keys_of(PyList_GET_ITEM(checks, row), PyTuple_GET_ITEM(first, COST), limits);
            PyObject *identity =
                keys ? identity_of(PyTuple_GET_ITEM(keys, column), PyTuple_GET_ITEM(limits, column)) : NULL;
            if (identity == NULL) {
                Py_RETURN_NONE;
            }
            length += 1 + 5 + 2 + head + PyUnicode_GET_LENGTH(identity) + 2;
        }
    }
    size_t places = 4;
    while (places < 2 * (size_t)size) {
        places *= 2;
    }
    PyObject *packed = PyBytes_FromStringAndSize(NULL, length);
    PyObject **seen = PyMem_Calloc(places * (size_t)width, sizeof(PyObject *));
    if (packed == NULL || seen == NULL) {
        Py_XDECREF(packed);
        PyMem_Free(seen);
        return PyErr_NoMemory();
    }
    char *at = PyBytes_AS_STRING(packed);
    bool is_meeting = false;
    for (Py_ssize_t row = 0; row < size; row++) {
        PyObject *keys = PyTuple_GET_ITEM(PyList_GET_ITEM(checks, row), KEYS);
        for (Py_ssize_t column = 0; column < width; column++) {
            PyObject *identity = PyTuple_GET_ITEM(PyTuple_GET_ITEM(keys, column), IDENTITY);
            at = put_key(at, PyTuple_GET_ITEM(heads, column), identity);
            is_meeting = is_meeting || was_seen(seen + places * (size_t)column, places, identity);
        }
    }
    PyMem_Free(seen);
    if (_PyBytes_Resize(&packed, at - PyBytes_AS_STRING(packed)) < 0) {
        return NULL;
    }
    return Py_BuildValue("nNO", size * width, packed, is_meeting ? Py_True : Py_False);
}

/* -- What comes back ----------------------------------------------------------------------------------------------- */

/* Whether it is an integer that a script could have replied: from 0 to what is exact. */
static bool
is_whole(PyObject *number)
{
    int is_wide;
    if (!PyLong_CheckExact(number)) {
        return false;
    }
    long long value = PyLong_AsLongLongAndOverflow(number, &is_wide);
    return !is_wide && 0 <= value && value < EXACT;
}

/* A new reference to the number at that place of a list; NULL, without an exception, where there is none. */
static PyObject *
number_at(PyObject *list, Py_ssize_t place)
{
    PyObject *number = place < PyList_GET_SIZE(list) ? PyList_GET_ITEM(list, place) : NULL;
    return number != NULL && is_whole(number) ? Py_NewRef(number) : NULL;
}

/* What the limits say who neither deny nor delay, from `place` on; NULL if one of them does, or there is no memory. */
static PyObject *
made_verdicts(const Names *known, PyObject *told, Py_ssize_t place, Py_ssize_t count)
{
    PyObject *verdicts = PyTuple_New(count);
    for (Py_ssize_t index = 0; verdicts != NULL && index < count; index++) {
        PyObject *verdict = PyTuple_New(VERDICT_FIELDS);
        PyObject *remaining = number_at(told, place + 2 * index), *reset_us = number_at(told, place + 2 * index + 1);
        if (verdict == NULL || remaining == NULL || reset_us == NULL) {
            Py_XDECREF(verdict);
            Py_XDECREF(remaining);
            Py_XDECREF(reset_us);
            Py_CLEAR(verdicts);
            break;
        }
        PyTuple_SET_ITEM(verdict, 0, remaining);
        PyTuple_SET_ITEM(verdict, 1, Py_NewRef(known->zero));
        PyTuple_SET_ITEM(verdict, 2, reset_us);
        PyTuple_SET_ITEM(verdict, 3, Py_NewRef(known->zero));
        PyTuple_SET_ITEM(verdicts, index, verdict);
    }
    return verdicts;
}

/* The decision that lets a request pass, by what its limits said. */
static PyObject *
passed(const Names *known, PyObject *check, PyObject *verdicts, PyObject *now_us)
{
    PyObject *keys = PyTuple_GET_ITEM(check, KEYS), *lease = PyTuple_GET_ITEM(check, LEASE);
    return made_decision(known->decision_type, true, keys, verdicts, lease, now_us, PyTuple_GET_ITEM(check, COST));
}

/* Whether the reply says that all pass, and nothing else that is unusual. */
static bool
is_usual(PyObject *reply)
{
    if (!PyList_CheckExact(reply) || PyList_GET_SIZE(reply) != REPLIED ||
        !is_whole(PyList_GET_ITEM(reply, NOW))) {
        return false;
    }
    for (Py_ssize_t place = TOLD; place < REPLIED; place++) {
        PyObject *part = PyList_GET_ITEM(reply, place);
        if (!PyList_CheckExact(part) || (place != TOLD && PyList_GET_SIZE(part))) {
            return false;
        }
    }
    return true;
}

PyDoc_STRVAR(answers_doc,
             "answers(checks, reply, /)\n--\n\n"
             "The decisions on checks that all pass, by the reply to their batch; None if it says anything else.");

static PyObject *
answers(PyObject *module, PyObject *const *args, Py_ssize_t number)
{
    const Names *known = PyModule_GetState(module);
    if (number != 2) {
        PyErr_SetString(PyExc_TypeError, "answers(checks, reply)");
        return NULL;
    }
    PyObject *checks = args[0], *reply = args[1];
    if (!PyList_CheckExact(checks) || !is_usual(reply)) {
        Py_RETURN_NONE;
    }
    PyObject *now_us = PyList_GET_ITEM(reply, NOW), *told = PyList_GET_ITEM(reply, TOLD);
    Py_ssize_t place = 0;
    PyObject *decisions = PyList_New(0);
    for (Py_ssize_t row = 0; decisions != NULL && row < PyList_GET_SIZE(checks); row++) {
        PyObject *check = PyList_GET_ITEM(checks, row);
        if (!PyTuple_Check(check) || PyTuple_GET_SIZE(check) != CHECKED ||
            !PyTuple_Check(PyTuple_GET_ITEM(check, KEYS))) {
            Py_CLEAR(decisions);
            break;
        }
        Py_ssize_t count = PyTuple_GET_SIZE(PyTuple_GET_ITEM(check, KEYS));
        PyObject *verdicts = made_verdicts(known, told, place, count);
        PyObject *decision = verdicts == NULL ? NULL : passed(known, check, verdicts, now_us);
        Py_XDECREF(verdicts);
        if (decision == NULL || PyList_Append(decisions, decision) < 0) {
            Py_CLEAR(decisions);
        }
        Py_XDECREF(decision);
        place += 2 * count;
    }
    if (decisions != NULL && place == PyList_GET_SIZE(told)) {
        return decisions;
    }
    Py_XDECREF(decisions);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* -- The module ---------------------------------------------------------------------------------------------------- */

static int
begin(PyObject *module)
{
    Names *known = PyModule_GetState(module);
    known->decision_type = decision_class();
    known->zero = PyLong_FromLong(0);
    return known->decision_type == NULL || known->zero == NULL ? -1 : 0;
}

static int
visit(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(((Names *)PyModule_GetState(module))->decision_type);
    return 0;
}

static int
clear(PyObject *module)
{
    Names *known = PyModule_GetState(module);
    Py_CLEAR(known->decision_type);
    Py_CLEAR(known->zero);
    return 0;
}

static void
end(void *module)
{
    clear(module);
}

static PyMethodDef METHODS[] = {
    {"pack_keys", (PyCFunction)(void (*)(void))pack_keys, METH_FASTCALL, pack_keys_doc},
    {"answers", (PyCFunction)(void (*)(void))answers, METH_FASTCALL, answers_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot MODULE_SLOTS[] = {{Py_mod_exec, begin}, KEEPS_TO_ITSELF, {0, NULL}};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "headgate.stores.redis._wire",
    .m_doc = "Batches as Redis gets and answers them, compiled.",
    .m_size = sizeof(Names),
    .m_methods = METHODS,
    .m_slots = MODULE_SLOTS,
    .m_traverse = visit,
    .m_clear = clear,
    .m_free = end,
};

PyMODINIT_FUNC
PyInit__wire(void)
{
    return PyModuleDef_Init(&MODULE);
}
