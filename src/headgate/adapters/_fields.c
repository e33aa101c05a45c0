/* The header fields of an answer in C. Mirrors fields.py, which says all, and `native_headers` in wsgi.py. */
#include "../_decision.h"

static const whole SECOND_US = 1000000;
static const whole LARGEST = 999999999999999;

/* In digits, with a sign. */
enum { LONGEST_NUMBER = 40 };

enum { MOST_FIELDS = 5 };

typedef struct {
    PyTypeObject *fields_type;
    PyObject *remaining;
    PyObject *reset;
    PyObject *ratelimit;
} Names;

/* Of one limit. */
typedef struct {
    whole filling_us;
    whole cost;
    whole quota;
    whole window;
    bool ends_at_once;
} LimitNumbers;

typedef struct {
    PyObject_HEAD
    PyObject *names;
    PyObject *quotas;
    PyObject *policy;
    LimitNumbers *limits;
    int x_ratelimit;
    int ratelimit;
} Fields;

/* Reads what `PlainFields` is given for a limit. False, with or without an exception, if it is something else. */
static bool
read_limit(PyObject *filling, PyObject *cost, PyObject *pace, LimitNumbers *limit)
{
    if (!read_whole(filling, &limit->filling_us) || !read_whole(cost, &limit->cost) || limit->cost < 0 ||
        !PyTuple_Check(pace) || PyTuple_GET_SIZE(pace) != 3 ||
        !read_whole(PyTuple_GET_ITEM(pace, 0), &limit->quota) || limit->quota < 1 ||
        limit->quota > LARGEST || !read_whole(PyTuple_GET_ITEM(pace, 1), &limit->window) || limit->window < 0 ||
        limit->window > LARGEST) {
        return false;
    }
    limit->ends_at_once = PyTuple_GET_ITEM(pace, 2) == Py_True;
    return true;
}

static void
fields_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Fields *fields = (Fields *)self;
    Py_XDECREF(fields->names);
    Py_XDECREF(fields->quotas);
    Py_XDECREF(fields->policy);
    PyMem_Free(fields->limits);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
fields_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"names", "quotas",      "filling",   "costs", "paces",
                               "policy", "x_ratelimit", "ratelimit", NULL};
    PyObject *names, *quotas, *filling, *costs, *paces, *policy;
    int x_ratelimit, ratelimit;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!O!O!pp", keywords, &PyTuple_Type, &names, &PyTuple_Type,
                                     &quotas, &PyTuple_Type, &filling, &PyTuple_Type, &costs, &PyTuple_Type, &paces,
                                     &PyTuple_Type, &policy, &x_ratelimit, &ratelimit)) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(names);
    if (PyTuple_GET_SIZE(quotas) != count || PyTuple_GET_SIZE(filling) != count || PyTuple_GET_SIZE(costs) != count ||
        PyTuple_GET_SIZE(paces) != count) {
        PyErr_SetString(PyExc_ValueError, "names, quotas, filling, costs and paces are of different lengths");
        return NULL;
    }
    Fields *self = (Fields *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->names = Py_NewRef(names);
    self->quotas = Py_NewRef(quotas);
    self->policy = Py_NewRef(policy);
    self->x_ratelimit = x_ratelimit;
    self->ratelimit = ratelimit;
    self->limits = PyMem_Calloc(count ? (size_t)count : 1, sizeof(LimitNumbers));
    if (self->limits == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t index = 0; self->limits != NULL && index < count && !PyErr_Occurred(); index++) {
        if (!PyBytes_CheckExact(PyTuple_GET_ITEM(names, index)) ||
            !read_limit(PyTuple_GET_ITEM(filling, index), PyTuple_GET_ITEM(costs, index),
                        PyTuple_GET_ITEM(paces, index), &self->limits[index])) {
            PyErr_SetString(PyExc_TypeError, "names are bytes, filling and costs whole numbers, paces those of Pace");
        }
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static char *
put_text(char *end, const char *text, Py_ssize_t length)
{
    memcpy(end, text, (size_t)length);
    return end + length;
}

static char *
put_number(char *end, whole number)
{
    char digits[LONGEST_NUMBER], *first = digits + LONGEST_NUMBER;
    if (number < 0) {
        *end++ = '-';
    }
    if ((long long)number == number) { /* a division of 64 bits is much quicker */
        unsigned long long rest = number < 0 ? -(unsigned long long)number : (unsigned long long)number;
        do {
            *--first = (char)('0' + rest % 10);
        } while (rest /= 10);
    }
    else {
        do {
            int digit = (int)(number % 10);
            *--first = (char)('0' + (digit < 0 ? -digit : digit));
        } while (number /= 10);
    }
    return put_text(end, first, digits + LONGEST_NUMBER - first);
}

static PyObject *
made_field(PyObject *name, const char *value, Py_ssize_t length)
{
    PyObject *bytes = PyBytes_FromStringAndSize(value, length);
    PyObject *field = bytes == NULL ? NULL : PyTuple_Pack(2, name, bytes);
    Py_XDECREF(bytes);
    return field;
}

static PyObject *
made_number_field(PyObject *name, whole number)
{
    char digits[LONGEST_NUMBER];
    return made_field(name, digits, put_number(digits, number) - digits);
}

static bool
read_verdict(PyObject *verdict, Verdict *read)
{
    if (!PyTuple_Check(verdict) || PyTuple_GET_SIZE(verdict) != 4 ||
        !read_whole(PyTuple_GET_ITEM(verdict, 0), &read->remaining) ||
        !read_whole(PyTuple_GET_ITEM(verdict, 1), &read->retry_us) ||
        !read_whole(PyTuple_GET_ITEM(verdict, 2), &read->reset_us)) {
        PyErr_Format(PyExc_TypeError, "%R is no verdict", verdict);
        return false;
    }
    return true;
}

/* How many further requests of the same cost the limit admits, or its rank below 0 if it denied; and the time until
 * there is more. */
static whole
room_of(const LimitNumbers *limit, const Verdict *verdict, whole *wait_us)
{
    const whole most = ((whole)1 << 126) - 1;
    const whole room = limit->cost ? verdict->remaining / limit->cost : most;
    *wait_us = verdict->reset_us;
    if (verdict->remaining && !verdict->retry_us) {
        return room;
    }
    if (verdict->retry_us == NEVER) {
        return -most;
    }
    if (verdict->retry_us) {
        *wait_us = verdict->retry_us;
        return -verdict->retry_us;
    }
    if (verdict->reset_us >= limit->filling_us) {
        *wait_us = verdict->reset_us - limit->filling_us;
    }
    return room;
}

/* `t` of RateLimit: clients may spread r over t seconds, and r/t must not exceed the rate of the policy. */
static whole
effective_window(const LimitNumbers *limit, whole left, whole wait_us)
{
    whole seconds = ceil_div(wait_us, SECOND_US);
    if (left > 0 && limit->window && !(limit->ends_at_once && wait_us)) {
        whole paced = ceil_div(left * limit->window, limit->quota);
        seconds = seconds < paced ? paced : seconds;
    }
    return smaller(seconds, LARGEST);
}

/* The fields, which are new references; how many, or -1 with an exception. */
static int
put_fields(const Fields *self, const Names *known, PyObject *verdicts, whole now_us, char *text, PyObject **fields)
{
    char *end = text;
    whole least = 0;
    Verdict verdict, of_tightest = {0, 0, 0, 0};
    Py_ssize_t tightest = 0;
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(verdicts); index++) {
        if (!read_verdict(PySequence_Fast_GET_ITEM(verdicts, index), &verdict)) {
            return -1;
        }
        const LimitNumbers *limit = &self->limits[index];
        whole wait_us, room = room_of(limit, &verdict, &wait_us), left = smaller(verdict.remaining, LARGEST);
        if (index == 0 || room < least || (room == least && verdict.reset_us > of_tightest.reset_us)) {
            least = room;
            tightest = index;
            of_tightest = verdict;
        }
        PyObject *name = PyTuple_GET_ITEM(self->names, index);
        end = put_text(end, ", ", index ? 2 : 0);
        end = put_text(end, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name));
        end = put_number(put_text(end, ";r=", 3), left);
        end = put_number(put_text(end, ";t=", 3), effective_window(limit, left, wait_us));
    }
    int count = 0;
    if (self->x_ratelimit) {
        fields[count++] = Py_NewRef(PyTuple_GET_ITEM(self->quotas, tightest));
        fields[count++] = made_number_field(known->remaining, of_tightest.remaining);
        fields[count++] = made_number_field(known->reset, ceil_div(now_us + of_tightest.reset_us, SECOND_US));
    }
    if (self->ratelimit) {
        fields[count++] = Py_NewRef(self->policy);
        fields[count++] = made_field(known->ratelimit, text, end - text);
    }
    return PyErr_Occurred() ? -1 : count;
}

/* The most bytes that `put_fields` can write; -1 with an exception if they are not the verdicts of these limits. */
static Py_ssize_t
most_bytes(const Fields *self, Py_ssize_t count)
{
    if (count != PyTuple_GET_SIZE(self->names)) {
        PyErr_Format(PyExc_IndexError, "%zd verdicts of %zd limits", count, PyTuple_GET_SIZE(self->names));
        return -1;
    }
    Py_ssize_t most = count * (2 * LONGEST_NUMBER + (Py_ssize_t)strlen(", ;r=;t="));
    for (Py_ssize_t index = 0; index < count; index++) {
        most += PyBytes_GET_SIZE(PyTuple_GET_ITEM(self->names, index));
    }
    return most;
}

/* Some header fields behind others, in a new list; takes them over. */
static PyObject *
listed(PyObject *before, PyObject *const *fields, int count)
{
    PyObject *all = NULL;
    Py_ssize_t others;
    do { /* Python's collector may run here, and whom it calls may change the others */
        others = before == NULL ? 0 : PyList_GET_SIZE(before);
        Py_XSETREF(all, PyList_New(others + count));
    } while (all != NULL && before != NULL && PyList_GET_SIZE(before) != others);
    for (Py_ssize_t index = 0; all != NULL && index < others; index++) {
        PyList_SET_ITEM(all, index, Py_NewRef(PyList_GET_ITEM(before, index)));
    }
    for (int index = 0; index < count; index++) {
        if (all == NULL) {
            Py_DECREF(fields[index]);
        }
        else {
            PyList_SET_ITEM(all, others + index, fields[index]);
        }
    }
    return all;
}

static PyObject *
headers_behind(void *module_state, PyObject *object, PyObject *before, PyObject *verdicts, PyObject *at_us)
{
    const Fields *self = (const Fields *)object;
    whole now_us;
    if (!read_whole(at_us, &now_us)) {
        PyErr_SetString(PyExc_TypeError, "headers(verdicts, now_us: int)");
        return NULL;
    }
    verdicts = PySequence_Fast(verdicts, "verdicts are a sequence");
    if (verdicts == NULL) {
        return NULL;
    }
    char small[1024], *large = NULL;
    PyObject *fields[MOST_FIELDS] = {NULL};
    int count = 0;
    if (PySequence_Fast_GET_SIZE(verdicts) > 0 && (self->x_ratelimit || self->ratelimit)) {
        Py_ssize_t most = most_bytes(self, PySequence_Fast_GET_SIZE(verdicts));
        if (most > (Py_ssize_t)sizeof(small) && (large = PyMem_Malloc((size_t)most)) == NULL) {
            PyErr_NoMemory();
            most = -1;
        }
        char *text = large == NULL ? small : large;
        count = most < 0 ? -1 : put_fields(self, module_state, verdicts, now_us, text, fields);
    }
    PyMem_Free(large);
    Py_DECREF(verdicts);
    if (count >= 0) {
        return listed(before, fields, count);
    }
    for (int index = 0; index < MOST_FIELDS; index++) {
        Py_XDECREF(fields[index]);
    }
    return NULL;
}

PyDoc_STRVAR(headers_doc, "headers(verdicts, now_us, /)\n--\n\nThe fields for an answer.");

static PyObject *
fields_headers(PyObject *object, PyObject *const *args, Py_ssize_t number)
{
    if (number != 2) {
        PyErr_SetString(PyExc_TypeError, "headers(verdicts, now_us: int)");
        return NULL;
    }
    return headers_behind(PyType_GetModuleState(Py_TYPE(object)), object, NULL, args[0], args[1]);
}

/* A pair of bytes as a pair of texts; NULL with an exception. */
static PyObject *
as_text(PyObject *field)
{
    PyObject *name, *value;
    if (!PyTuple_Check(field) || PyTuple_GET_SIZE(field) != 2 || !PyBytes_Check(name = PyTuple_GET_ITEM(field, 0)) ||
        !PyBytes_Check(value = PyTuple_GET_ITEM(field, 1))) {
        return PyErr_Format(PyExc_TypeError, "%R is no pair of bytes", field);
    }
    PyObject *pair = NULL, *first = PyUnicode_DecodeUTF8(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name), NULL);
    PyObject *second =
        first == NULL ? NULL : PyUnicode_DecodeUTF8(PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value), NULL);
    if (second != NULL) {
        pair = PyTuple_Pack(2, first, second);
    }
    Py_XDECREF(first);
    Py_XDECREF(second);
    return pair;
}

PyDoc_STRVAR(native_doc, "native_headers(headers, /)\n--\n\nHeader fields as text: ours are ASCII.");

static PyObject *
native_headers(PyObject *Py_UNUSED(module), PyObject *headers)
{
    if (!PyList_Check(headers)) {
        return PyErr_Format(PyExc_TypeError, "native_headers(headers: list), not %R", headers);
    }
    PyObject *texts = PyList_New(0);
    for (Py_ssize_t index = 0; texts != NULL && index < PyList_GET_SIZE(headers); index++) {
        PyObject *pair = as_text(PyList_GET_ITEM(headers, index));
        if (pair == NULL || PyList_Append(texts, pair) < 0) {
            Py_CLEAR(texts);
        }
        Py_XDECREF(pair);
    }
    return texts;
}

static PyMethodDef METHODS[] = {
    {"native_headers", native_headers, METH_O, native_doc},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef FIELDS_METHODS[] = {
    {"headers", (PyCFunction)(void (*)(void))fields_headers, METH_FASTCALL, headers_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot FIELDS_SLOTS[] = {
    {Py_tp_new, fields_new},
    {Py_tp_dealloc, fields_dealloc},
    {Py_tp_methods, FIELDS_METHODS},
    {Py_tp_doc, "The limits of one kind of request, as header fields tell them."},
    {0, NULL},
};

static PyType_Spec FIELDS = {
    .name = "headgate.adapters._fields.RateLimitHeaders",
    .basicsize = sizeof(Fields),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = FIELDS_SLOTS,
};

static int
begin(PyObject *module)
{
    Names *known = PyModule_GetState(module);
    known->fields_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &FIELDS, NULL);
    known->remaining = PyBytes_FromString("x-ratelimit-remaining");
    known->reset = PyBytes_FromString("x-ratelimit-reset");
    known->ratelimit = PyBytes_FromString("ratelimit");
    if (known->fields_type == NULL || known->remaining == NULL || known->reset == NULL || known->ratelimit == NULL) {
        return -1;
    }
    return PyModule_AddType(module, known->fields_type);
}

static int
visit(PyObject *module, visitproc visit, void *arg)
{
    Names *known = PyModule_GetState(module);
    Py_VISIT(known->fields_type);
    return 0;
}

static int
clear(PyObject *module)
{
    Names *known = PyModule_GetState(module);
    Py_CLEAR(known->fields_type);
    Py_CLEAR(known->remaining);
    Py_CLEAR(known->reset);
    Py_CLEAR(known->ratelimit);
    return 0;
}

static void
end(void *module)
{
    clear(module);
}

static PyModuleDef_Slot MODULE_SLOTS[] = {{Py_mod_exec, begin}, KEEPS_TO_ITSELF, {0, NULL}};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "headgate.adapters._fields",
    .m_doc = "Header fields, compiled.",
    .m_size = sizeof(Names),
    .m_methods = METHODS,
    .m_slots = MODULE_SLOTS,
    .m_traverse = visit,
    .m_clear = clear,
    .m_free = end,
};

PyMODINIT_FUNC
PyInit__fields(void)
{
    return PyModuleDef_Init(&MODULE);
}
