/* What most rejections are, packed and put into the queue: those by limits that are everybody's, and by the store's own
 * answer. Mirrors `plain_keep` in packing.py; whatever else there is is left to Python, by answering None. */
#include "../_decision.h"

#include <stdint.h>

/* The places of what is needed in a Resolution, a Key and a _Place. */
enum { ROUTE = 0, KEYS = 1, RULES = 3, WHO = 4, TIER = 5, RESOLVED = 8 };
enum { LIMIT = 0 };
enum { PLACE_RULES = 0, PLACE_LIMITS = 1, PLACE_PACKED = 2, PLACED = 3 };

typedef struct {
    PyObject *refusal;
    PyObject *resolution;
    PyObject *decision;
    PyObject *came_us;
    PyObject *method;
    PyObject *append;
} Names;

/* -- A sheet: what `marshal.loads` reads, written as the values come, kind by kind ---------------------------- */

enum { LONGEST = 2048 };

typedef struct {
    unsigned char bytes[LONGEST];
    Py_ssize_t length;
    /* Whether something was too long, or is not of the kind that it mostly is. */
    bool is_spoilt;
} Sheet;

static void
put_bytes(Sheet *sheet, const void *bytes, Py_ssize_t length)
{
    if (sheet->is_spoilt || length > LONGEST - sheet->length) {
        sheet->is_spoilt = true;
        return;
    }
    memcpy(sheet->bytes + sheet->length, bytes, (size_t)length);
    sheet->length += length;
}

static void
put_kind(Sheet *sheet, char kind)
{
    put_bytes(sheet, &kind, 1);
}

static void
put_int32(Sheet *sheet, int32_t number)
{
    uint32_t bits = (uint32_t)number;
    const unsigned char bytes[] = {bits & 0xff, bits >> 8 & 0xff, bits >> 16 & 0xff, bits >> 24};
    put_bytes(sheet, bytes, sizeof(bytes));
}

/* In 32 bits, or else in digits of 15 bits, whose number says the sign. */
static void
put_number(Sheet *sheet, PyObject *value)
{
    int is_wide = 1;
    long long number = PyLong_CheckExact(value) ? PyLong_AsLongLongAndOverflow(value, &is_wide) : 0;
    if (is_wide || number == LLONG_MIN) {
        sheet->is_spoilt = true;
        return;
    }
    if (number >= INT32_MIN && number <= INT32_MAX) {
        put_kind(sheet, 'i');
        put_int32(sheet, (int32_t)number);
        return;
    }
    unsigned char digits[2 * 5];
    int32_t count = 0;
    for (unsigned long long rest = number < 0 ? -(unsigned long long)number : (unsigned long long)number; rest;
         rest >>= 15) {
        digits[2 * count] = rest & 0xff;
        digits[2 * count + 1] = rest >> 8 & 0x7f;
        count++;
    }
    put_kind(sheet, 'l');
    put_int32(sheet, number < 0 ? -count : count);
    put_bytes(sheet, digits, 2 * count);
}

static void
put_text(Sheet *sheet, PyObject *value)
{
    Py_ssize_t length = 0;
    const char *text = PyUnicode_CheckExact(value) ? PyUnicode_AsUTF8AndSize(value, &length) : NULL;
    if (text == NULL || length > LONGEST) {
        PyErr_Clear(); /* of half a pair of surrogates */
        sheet->is_spoilt = true;
        return;
    }
    put_kind(sheet, 'u');
    put_int32(sheet, (int32_t)length);
    put_bytes(sheet, text, length);
}

static void
put_texts(Sheet *sheet, PyObject *value)
{
    PyObject *name, *text;
    Py_ssize_t place = 0;
    if (!PyDict_CheckExact(value)) {
        sheet->is_spoilt = true;
        return;
    }
    put_kind(sheet, '{');
    while (PyDict_Next(value, &place, &name, &text)) {
        put_text(sheet, name);
        put_text(sheet, text);
    }
    put_kind(sheet, '0');
}

static void
put_packed(Sheet *sheet, PyObject *value)
{
    if (!PyBytes_CheckExact(value) || PyBytes_GET_SIZE(value) > LONGEST) {
        sheet->is_spoilt = true;
        return;
    }
    put_kind(sheet, 's');
    put_int32(sheet, (int32_t)PyBytes_GET_SIZE(value));
    put_bytes(sheet, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value));
}

static void
put_tuple(Sheet *sheet, PyObject *value, void (*put_each)(Sheet *, PyObject *))
{
    if (!PyTuple_CheckExact(value) || PyTuple_GET_SIZE(value) > LONGEST) {
        sheet->is_spoilt = true;
        return;
    }
    put_kind(sheet, '(');
    put_int32(sheet, (int32_t)PyTuple_GET_SIZE(value));
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(value); index++) {
        put_each(sheet, PyTuple_GET_ITEM(value, index));
    }
}

static void
put_verdict(Sheet *sheet, PyObject *value)
{
    put_tuple(sheet, value, put_number);
}

/* -- What is common ------------------------------------------------------------------------------------------------ */

static bool
is_tuple_of(PyObject *value, Py_ssize_t size)
{
    return value != NULL && PyTuple_Check(value) && PyTuple_GET_SIZE(value) == size;
}

/* NULL, without an exception, where nothing is known of it. */
static PyObject *
known_place(PyObject *places, PyObject *resolution)
{
    PyObject *route = PyTuple_GET_ITEM(resolution, ROUTE), *tier = PyTuple_GET_ITEM(resolution, TIER);
    PyObject *name = tier == Py_None ? Py_NewRef(route) : PyTuple_Pack(2, route, tier), *place = NULL;
    if (name != NULL) {
        found(places, name, &place);
        Py_DECREF(name);
    }
    PyErr_Clear();
    return place;
}

/* Whether the limits are those that hold for everybody on this route, in this tier. */
static bool
are_everybodys(PyObject *place, PyObject *resolution)
{
    PyObject *limits = PyTuple_GET_ITEM(place, PLACE_LIMITS), *keys = PyTuple_GET_ITEM(resolution, KEYS);
    if (PyTuple_GET_ITEM(place, PLACE_RULES) != PyTuple_GET_ITEM(resolution, RULES)) {
        return false;
    }
    if (limits == Py_None) {
        return true;
    }
    if (!PyTuple_Check(keys) || !is_tuple_of(limits, PyTuple_GET_SIZE(keys))) {
        return false;
    }
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(keys); index++) {
        PyObject *key = PyTuple_GET_ITEM(keys, index);
        if (!PyTuple_Check(key) || PyTuple_GET_SIZE(key) == 0 ||
            PyTuple_GET_ITEM(key, LIMIT) != PyTuple_GET_ITEM(limits, index)) {
            return false;
        }
    }
    return true;
}

/* NULL, without an exception, where it is not of the common kind. */
static PyObject *
packed(const Names *known, PyObject *arrival, PyObject *admission, PyObject *place, PyObject *who, PyObject *verdicts)
{
    Sheet sheet;
    sheet.length = 0;
    PyObject *came_us = PyObject_GetAttr(admission, known->came_us);
    PyObject *method = came_us == NULL ? NULL : PyObject_GetAttr(arrival, known->method);
    sheet.is_spoilt = method == NULL;
    if (method != NULL) {
        put_kind(&sheet, '(');
        put_int32(&sheet, 5);
        put_number(&sheet, came_us);
        put_text(&sheet, method);
        put_packed(&sheet, place);
        put_texts(&sheet, who);
        put_tuple(&sheet, verdicts, put_verdict);
    }
    Py_XDECREF(came_us);
    Py_XDECREF(method);
    return sheet.is_spoilt ? NULL : PyBytes_FromStringAndSize((const char *)sheet.bytes, sheet.length);
}

static PyObject *
denial(const Names *known, PyObject *places, PyObject *arrival, PyObject *admission)
{
    PyObject *bytes = NULL, *resolution = NULL, *decision = NULL, *place = NULL;
    PyObject *refusal = PyObject_GetAttr(admission, known->refusal);
    if (refusal != NULL && refusal != Py_None) {
        resolution = PyObject_GetAttr(admission, known->resolution);
        decision = resolution == NULL ? NULL : PyObject_GetAttr(admission, known->decision);
    }
    if (is_tuple_of(resolution, RESOLVED) && is_tuple_of(decision, DECISION_FIELDS) &&
        PyTuple_GET_ITEM(decision, SAID_DEGRADED) == Py_None) {
        place = known_place(places, resolution);
    }
    if (is_tuple_of(place, PLACED) && are_everybodys(place, resolution)) {
        bytes = packed(known, arrival, admission, PyTuple_GET_ITEM(place, PLACE_PACKED),
                       PyTuple_GET_ITEM(resolution, WHO), PyTuple_GET_ITEM(decision, SAID_VERDICTS));
    }
    Py_XDECREF(refusal);
    Py_XDECREF(resolution);
    Py_XDECREF(decision);
    Py_XDECREF(place);
    return bytes;
}

PyDoc_STRVAR(keep_doc, "keep(places, queue, most, arrival, admission, /)\n--\n\n"
                       "Put a common rejection into the queue; whether there was room. None for all others.");

static PyObject *
keep(PyObject *module, PyObject *const *args, Py_ssize_t number)
{
    const Names *known = PyModule_GetState(module);
    if (number != 5 || !PyDict_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "keep(places: dict, queue, most, arrival, admission)");
        return NULL;
    }
    PyObject *queue = args[1], *bytes = denial(known, args[0], args[3], args[4]);
    if (bytes == NULL) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    Py_ssize_t length = PyObject_Size(queue), most = PyLong_AsSsize_t(args[2]);
    PyObject *done = NULL;
    if (!PyErr_Occurred()) {
        done = length < most ? PyObject_CallMethodOneArg(queue, known->append, bytes) : Py_NewRef(Py_None);
    }
    Py_DECREF(bytes);
    if (done == NULL) {
        return NULL;
    }
    Py_DECREF(done);
    return Py_NewRef(length < most ? Py_True : Py_False);
}

/* -- The module ---------------------------------------------------------------------------------------------------- */

static int
begin(PyObject *module)
{
    Names *known = PyModule_GetState(module);
    known->refusal = PyUnicode_InternFromString("refusal");
    known->resolution = PyUnicode_InternFromString("resolution");
    known->decision = PyUnicode_InternFromString("decision");
    known->came_us = PyUnicode_InternFromString("came_us");
    known->method = PyUnicode_InternFromString("method");
    known->append = PyUnicode_InternFromString("append");
    bool is_ready = known->refusal != NULL && known->resolution != NULL && known->decision != NULL &&
                    known->came_us != NULL && known->method != NULL && known->append != NULL;
    return is_ready ? 0 : -1;
}

static void
end(void *module)
{
    Names *known = PyModule_GetState(module);
    Py_CLEAR(known->refusal);
    Py_CLEAR(known->resolution);
    Py_CLEAR(known->decision);
    Py_CLEAR(known->came_us);
    Py_CLEAR(known->method);
    Py_CLEAR(known->append);
}

static PyMethodDef METHODS[] = {
    {"keep", (PyCFunction)(void (*)(void))keep, METH_FASTCALL, keep_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot MODULE_SLOTS[] = {{Py_mod_exec, begin}, KEEPS_TO_ITSELF, {0, NULL}};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "headgate.telemetry._packing",
    .m_doc = "What most rejections are, packed and kept.",
    .m_size = sizeof(Names),
    .m_methods = METHODS,
    .m_slots = MODULE_SLOTS,
    .m_free = end,
};

PyMODINIT_FUNC
PyInit__packing(void)
{
    return PyModuleDef_Init(&MODULE);
}
