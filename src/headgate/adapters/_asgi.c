/* What an ASGI server hands over, and what goes back to it, in C. Mirrors asgi.py, which says what it means; a path
 * that is not simply one is left to mounts.py. */
#include "../_decision.h"
#include "_calls.h"

typedef struct {
    PyTypeObject *arrival_type;
    PyTypeObject *telling_type;
    PyTypeObject *admission_type;
    PyTypeObject *decision_type;
    PyObject *placed;
    PyObject *method;
    PyObject *path;
    PyObject *root_path;
    PyObject *client;
    PyObject *headers;
    PyObject *type;
    PyObject *no_root;
    PyObject *more_body;
    PyObject *current;
    PyObject *nobody;
    PyObject *sent;
    /* Of asgi.py, which is not there yet when this is read. */
    PyObject *go_on;
    PyObject *wait_for;
    /* NULL where _fields.c could not be compiled. */
    const FieldsCalls *fields;
    PyObject *fields_module;
    AsgiCalls calls;
    /* Where admissions keep what is asked of them. */
    Py_ssize_t decision_at;
    Py_ssize_t description_at;
    Place headers_in_description;
} Names;

static struct PyModuleDef MODULE;

static Names *
known_to(PyObject *self)
{
    return PyModule_GetState(PyType_GetModuleByDef(Py_TYPE(self), &MODULE));
}

/* False where it has nothing of that name, or an exception was raised. A dict, or whatever else is a mapping. */
static bool
looked_up(PyObject *mapping, PyObject *name, PyObject **value)
{
    if (PyDict_CheckExact(mapping)) {
        return found(mapping, name, value);
    }
    *value = PyObject_GetItem(mapping, name);
    if (*value == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
    }
    return *value != NULL;
}

/* -- AsgiArrival --------------------------------------------------------------------------------------------------- */

static bool
is_plain(PyObject *path)
{
    return PyUnicode_Check(path) && PyUnicode_GET_LENGTH(path) > 0 && PyUnicode_READ_CHAR(path, 0) == '/';
}

/* The path from the server's root on, and that below the mount, as mounts.py tells them. */
static bool
place(const Names *known, Request *self, PyObject *path, PyObject *root)
{
    PyObject *both = PyObject_CallFunctionObjArgs(known->placed, path, root, NULL);
    bool is_pair = both != NULL && PyTuple_Check(both) && PyTuple_GET_SIZE(both) == 2;
    if (is_pair) {
        Py_XSETREF(self->path, Py_NewRef(PyTuple_GET_ITEM(both, 0)));
        Py_XSETREF(self->below, Py_NewRef(PyTuple_GET_ITEM(both, 1)));
    }
    else if (both != NULL) {
        PyErr_SetString(PyExc_TypeError, "a path is told as a pair");
    }
    Py_XDECREF(both);
    return is_pair;
}

static bool
find_path(const Names *known, Request *self, PyObject *scope, PyObject *given_root)
{
    PyObject *path = item_of(scope, known->path), *root = NULL;
    if (path == NULL) {
        return false;
    }
    int has_root = given_root == NULL ? 0 : PyObject_IsTrue(given_root);
    if (has_root > 0) {
        root = Py_NewRef(given_root);
    }
    else if (has_root == 0 && looked_up(scope, known->root_path, &root)) {
        has_root = PyObject_IsTrue(root);
    }
    bool is_found = has_root >= 0 && !PyErr_Occurred();
    if (is_found && !has_root && is_plain(path)) {
        Py_XSETREF(self->path, Py_NewRef(path));
        Py_XSETREF(self->below, Py_NewRef(Py_None));
    }
    else if (is_found) {
        is_found = place(known, self, path, has_root ? root : known->no_root);
    }
    Py_DECREF(path);
    Py_XDECREF(root);
    return is_found;
}

static bool
find_peer(const Names *known, Request *self, PyObject *scope)
{
    PyObject *client = NULL, *peer = NULL;
    int is_known = looked_up(scope, known->client, &client) ? PyObject_IsTrue(client) : 0;
    if (is_known > 0) {
        peer = PySequence_GetItem(client, 0);
    }
    Py_XDECREF(client);
    if (PyErr_Occurred()) {
        return false;
    }
    Py_XSETREF(self->peer, peer == NULL ? Py_NewRef(Py_None) : peer);
    return true;
}

static bool
read_request(void *module_state, Request *self, PyObject *scope, PyObject *root)
{
    const Names *known = module_state;
    PyObject *method = NULL;
    if (!looked_up(scope, known->method, &method) && !PyErr_Occurred()) {
        method = PyUnicode_FromString("GET");
    }
    if (method == NULL) {
        return false;
    }
    Py_XSETREF(self->native, Py_NewRef(scope));
    Py_XSETREF(self->method, method);
    return find_path(known, self, scope, root) && find_peer(known, self, scope);
}

static int
arrival_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"scope", "root", NULL};
    PyObject *scope, *root = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|U", names, &scope, &root)) {
        return -1;
    }
    return read_request(known_to(object), &((Arrival *)object)->request, scope, root) ? 0 : -1;
}

/* The same in one step, as the middleware makes them. */
static PyObject *
arrival_made(PyObject *type, PyObject *const *args, size_t flags, PyObject *names)
{
    Py_ssize_t number = PyVectorcall_NARGS(flags);
    if (number < 1 || number > 2 || names != NULL || (number == 2 && !PyUnicode_Check(args[1]))) {
        PyErr_SetString(PyExc_TypeError, "AsgiArrival(scope, root: str = '')");
        return NULL;
    }
    PyObject *self = ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    if (self != NULL &&
        !read_request(known_to(self), &((Arrival *)self)->request, args[0], number == 2 ? args[1] : NULL)) {
        Py_CLEAR(self);
    }
    return self;
}

/* The same of a request that was read already, and is taken over. */
static PyObject *
arrival_of(void *module_state, Request *request)
{
    PyTypeObject *type = ((const Names *)module_state)->arrival_type;
    PyObject *self = type->tp_alloc(type, 0);
    if (self != NULL) {
        ((Arrival *)self)->request = *request;
        *request = (Request){0};
    }
    return self;
}

static bool
append_line(PyObject *lines, PyObject *pair, const char *wanted, Py_ssize_t length)
{
    PyObject *name, *value;
    if (PySequence_Fast_GET_SIZE(pair) != 2 || !PyBytes_Check(name = PySequence_Fast_GET_ITEM(pair, 0)) ||
        !PyBytes_Check(value = PySequence_Fast_GET_ITEM(pair, 1))) {
        PyErr_SetString(PyExc_TypeError, "a header is a pair of bytes");
        return false;
    }
    if (PyBytes_GET_SIZE(name) != length || memcmp(PyBytes_AS_STRING(name), wanted, (size_t)length) != 0) {
        return true;
    }
    PyObject *line = PyUnicode_DecodeLatin1(PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value), NULL);
    bool is_appended = line != NULL && PyList_Append(lines, line) == 0;
    Py_XDECREF(line);
    return is_appended;
}

static PyObject *
lines_of(void *module_state, PyObject *scope, PyObject *name)
{
    Py_ssize_t length;
    const char *wanted = PyUnicode_AsUTF8AndSize(name, &length);
    if (wanted == NULL) {
        return NULL;
    }
    PyObject *headers = PyObject_GetItem(scope, ((const Names *)module_state)->headers), *lines = NULL;
    if (headers != NULL) {
        Py_SETREF(headers, PySequence_Fast(headers, "headers are a sequence"));
        lines = headers == NULL ? NULL : PyList_New(0);
    }
    for (Py_ssize_t index = 0; lines != NULL && index < PySequence_Fast_GET_SIZE(headers); index++) {
        PyObject *pair = PySequence_Fast(PySequence_Fast_GET_ITEM(headers, index), "a header is a pair of bytes");
        if (pair == NULL || !append_line(lines, pair, wanted, length)) {
            Py_CLEAR(lines);
        }
        Py_XDECREF(pair);
    }
    Py_XDECREF(headers);
    return lines;
}

PyDoc_STRVAR(header_doc, "header($self, name, /)\n--\n\n"
                         "The values of all lines of a header; the name in lower case.");

static PyObject *
arrival_header(PyObject *object, PyObject *name)
{
    PyObject *native = ((Arrival *)object)->request.native;
    return native == NULL ? PyErr_Format(PyExc_AttributeError, "native") : lines_of(known_to(object), native, name);
}

static int
arrival_traverse(PyObject *object, visitproc visit, void *arg)
{
    Request *request = &((Arrival *)object)->request;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(request->native);
    Py_VISIT(request->method);
    Py_VISIT(request->path);
    Py_VISIT(request->below);
    Py_VISIT(request->peer);
    return 0;
}

static int
arrival_clear(PyObject *object)
{
    let_go_of(&((Arrival *)object)->request);
    return 0;
}

static void
arrival_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    arrival_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef ARRIVAL_METHODS[] = {
    {"header", arrival_header, METH_O, header_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef ARRIVAL_MEMBERS[] = {
    {"native", T_OBJECT_EX, offsetof(Arrival, request.native), 0, NULL},
    {"method", T_OBJECT_EX, offsetof(Arrival, request.method), 0, NULL},
    {"path", T_OBJECT_EX, offsetof(Arrival, request.path), 0, NULL},
    {"below", T_OBJECT_EX, offsetof(Arrival, request.below), 0, NULL},
    {"peer", T_OBJECT_EX, offsetof(Arrival, request.peer), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot ARRIVAL_SLOTS[] = {
    {Py_tp_init, arrival_init},
    {Py_tp_traverse, arrival_traverse},
    {Py_tp_clear, arrival_clear},
    {Py_tp_dealloc, arrival_dealloc},
    {Py_tp_methods, ARRIVAL_METHODS},
    {Py_tp_members, ARRIVAL_MEMBERS},
    {Py_tp_doc, "AsgiArrival(scope, root='')\n--\n\nA request, or the handshake of a websocket."},
    {0, NULL},
};

static PyType_Spec ARRIVAL = {
    .name = "headgate.adapters._asgi.AsgiArrival",
    .basicsize = sizeof(Arrival),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = ARRIVAL_SLOTS,
};

/* -- TellingSend: what an app sends, with the fields of its admission ---------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Names *known;
    PyObject *send;
    PyObject *admission;
    PyObject *token;
} Telling;

typedef enum { BEGINNING, BODY, ANYTHING_ELSE } Kind;

static Kind
kind_of(PyObject *text)
{
    if (IS_TEXT(text, "http.response.body")) {
        return BODY;
    }
    if (IS_TEXT(text, "http.response.start") || IS_TEXT(text, "websocket.accept") ||
        IS_TEXT(text, "websocket.http.response.start")) {
        return BEGINNING;
    }
    return IS_TEXT(text, "websocket.http.response.body") ? BODY : ANYTHING_ELSE;
}

/* 1 if nothing of the answer follows this part of its body, 0 if something does, -1 if an exception was raised. */
static int
is_last(const Names *known, PyObject *message)
{
    PyObject *more = NULL;
    if (!looked_up(message, known->more_body, &more)) {
        return PyErr_Occurred() ? -1 : 1;
    }
    int is_more = PyObject_IsTrue(more);
    Py_DECREF(more);
    return is_more < 0 ? -1 : !is_more;
}

/* Make its admission current. False with an exception. */
static bool
enter(Telling *self)
{
    PyObject *token = PyContextVar_Set(self->known->current, self->admission);
    if (token != NULL) {
        Py_XSETREF(self->token, token);
    }
    return token != NULL;
}

/* Make it current no more. False with an exception. */
static bool
leave(void *module_state, PyObject *object)
{
    const Names *known = module_state;
    if (PyContextVar_Reset(known->current, ((Telling *)object)->token) == 0) {
        return true;
    }
    /* In a task that has a context of its own, or left once already. */
    PyErr_Clear();
    PyObject *token = PyContextVar_Set(known->current, known->nobody);
    Py_XDECREF(token);
    return token != NULL;
}

static PyObject *
telling_enter(PyObject *object, PyObject *Py_UNUSED(nothing))
{
    return enter((Telling *)object) ? Py_NewRef(Py_None) : NULL;
}

static PyObject *
telling_leave(PyObject *object, PyObject *Py_UNUSED(nothing))
{
    return leave(((Telling *)object)->known, object) ? Py_NewRef(Py_None) : NULL;
}

/* What it takes to wait for the last message, which asgi.py has. */
static bool
find_rest(Names *known)
{
    if (known->wait_for == NULL) {
        Py_XSETREF(known->go_on, taken_from("headgate.adapters.asgi", "go_on"));
        known->wait_for = known->go_on == NULL ? NULL : taken_from("headgate.adapters.asgi", "wait_for");
    }
    return known->wait_for != NULL;
}

/* The last message could not be sent, which is the exception that is raised now: the admission is current again. */
static PyObject *
not_sent(Telling *self)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (enter(self)) {
        PyErr_Restore(type, value, traceback);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return NULL;
}

/* `send_last` in asgi.py. */
static PyObject *
send_last(Telling *self, PyObject *message)
{
    Names *known = self->known;
    if (!find_rest(known) || !leave(known, (PyObject *)self)) {
        return NULL;
    }
    PyObject *sending = PyObject_CallOneArg(self->send, message), *waited_for = NULL, *rest = NULL;
    if (sending == NULL) {
        return not_sent(self);
    }
    if (!PyCoro_CheckExact(sending)) {
        rest = PyObject_CallFunctionObjArgs(known->wait_for, self, sending, NULL);
        Py_DECREF(sending);
        return rest;
    }
    PySendResult result = PyIter_Send(sending, Py_None, &waited_for);
    if (result == PYGEN_RETURN) {
        rest = enter(self) ? Py_NewRef(known->sent) : NULL;
    }
    else if (result == PYGEN_NEXT) {
        rest = PyObject_CallFunctionObjArgs(known->go_on, self, sending, waited_for, NULL);
    }
    else {
        not_sent(self);
    }
    Py_DECREF(sending);
    Py_XDECREF(waited_for);
    return rest;
}

/* The header fields of a message that begins an answer, in a new list; NULL with an exception. */
static PyObject *
own_fields(const Names *known, PyObject *message)
{
    PyObject *own = NULL, *all;
    if (!looked_up(message, known->headers, &own)) {
        return PyErr_Occurred() ? NULL : PyList_New(0);
    }
    if (PyList_CheckExact(own)) { /* as it is of all frameworks: nobody changes it before it is copied */
        return own;
    }
    all = PySequence_List(own);
    Py_DECREF(own);
    return all;
}

/* Those of an admission behind others, in a new list: `Admission.headers`, without a step of Python where it has a
 * decision to tell of. */
static PyObject *
all_fields(Names *known, PyObject *own, PyObject *admission)
{
    PyObject *description = NULL, *decision = NULL, *method = NULL;
    if (Py_IS_TYPE(admission, known->admission_type)) {
        description = slot(admission, known->description_at);
        decision = slot(admission, known->decision_at);
    }
    if (known->fields != NULL && description != NULL && description != Py_None && decision != NULL &&
        is_decision(decision, known->decision_type)) {
        method = kept_in(&known->headers_in_description, description, "headers");
    }
    if (method != NULL && PyCFunction_CheckExact(method) &&
        PyCFunction_GET_FUNCTION(method) == known->fields->method) {
        Py_INCREF(description); /* somebody may hush the admission meanwhile */
        Py_INCREF(decision);
        PyObject *all = known->fields->headers(known->fields->known, PyCFunction_GET_SELF(method), own,
                                               PyTuple_GET_ITEM(decision, SAID_VERDICTS),
                                               PyTuple_GET_ITEM(decision, SAID_AT_US));
        Py_DECREF(description);
        Py_DECREF(decision);
        return all;
    }
    PyObject *fields = PyObject_GetAttr(admission, known->headers);
    PyObject *all = fields == NULL ? NULL : PyList_GetSlice(own, 0, PyList_GET_SIZE(own));
    if (all != NULL && PyList_SetSlice(all, PyList_GET_SIZE(all), PyList_GET_SIZE(all), fields) < 0) {
        Py_CLEAR(all);
    }
    Py_XDECREF(fields);
    return all;
}

/* The message with the admission's fields behind its own. The app's own message stays as it is. */
static PyObject *
with_fields(Names *known, PyObject *message, PyObject *admission)
{
    PyObject *own = own_fields(known, message), *changed = NULL;
    PyObject *all = own == NULL ? NULL : all_fields(known, own, admission);
    if (all != NULL) {
        changed = PyDict_CheckExact(message) ? PyDict_Copy(message) : PyDict_New();
    }
    if (changed != NULL && ((!PyDict_CheckExact(message) && PyDict_Update(changed, message) < 0) ||
                            PyDict_SetItem(changed, known->headers, all) < 0)) {
        Py_CLEAR(changed);
    }
    Py_XDECREF(own);
    Py_XDECREF(all);
    return changed;
}

static PyObject *
telling_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Telling *self = (Telling *)object;
    if (PyVectorcall_NARGS(flags) != 1 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "send(message)");
        return NULL;
    }
    Names *known = self->known;
    PyObject *text = item_of(args[0], known->type);
    if (text == NULL) {
        return NULL;
    }
    Kind kind = kind_of(text);
    Py_DECREF(text);
    if (kind == BEGINNING) {
        PyObject *message = with_fields(known, args[0], self->admission);
        PyObject *sent = message == NULL ? NULL : PyObject_CallOneArg(self->send, message);
        Py_XDECREF(message);
        return sent;
    }
    int is_at_its_end = kind == BODY ? is_last(known, args[0]) : 0;
    if (is_at_its_end != 0) {
        return is_at_its_end < 0 ? NULL : send_last(self, args[0]);
    }
    return PyObject_CallOneArg(self->send, args[0]);
}

static PyObject *
telling_of(void *module_state, PyObject *send, PyObject *admission)
{
    PyTypeObject *type = ((Names *)module_state)->telling_type;
    Telling *self = (Telling *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->call = telling_call;
        self->known = module_state;
        self->send = Py_NewRef(send);
        self->admission = Py_NewRef(admission);
        if (!enter(self)) {
            Py_CLEAR(self);
        }
    }
    return (PyObject *)self;
}

static PyObject *
telling_made(PyObject *type, PyObject *const *args, size_t flags, PyObject *names)
{
    if (PyVectorcall_NARGS(flags) != 2 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "TellingSend(send, admission)");
        return NULL;
    }
    return telling_of(PyType_GetModuleState((PyTypeObject *)type), args[0], args[1]);
}

static int
telling_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Telling *)object)->send);
    Py_VISIT(((Telling *)object)->admission);
    Py_VISIT(((Telling *)object)->token);
    return 0;
}

static int
telling_clear(PyObject *object)
{
    Py_CLEAR(((Telling *)object)->send);
    Py_CLEAR(((Telling *)object)->admission);
    Py_CLEAR(((Telling *)object)->token);
    return 0;
}

static void
telling_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    telling_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef TELLING_MEMBERS[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Telling, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef TELLING_METHODS[] = {
    {"enter", telling_enter, METH_NOARGS, "enter()\n--\n\nMake its admission current."},
    {"leave", telling_leave, METH_NOARGS, "leave()\n--\n\nMake it current no more."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot TELLING_SLOTS[] = {
    {Py_tp_methods, TELLING_METHODS},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_traverse, telling_traverse},
    {Py_tp_clear, telling_clear},
    {Py_tp_dealloc, telling_dealloc},
    {Py_tp_members, TELLING_MEMBERS},
    {Py_tp_doc, "TellingSend(send, admission)\n--\n\nSends what the app sends, with the fields of its admission."},
    {0, NULL},
};

static PyType_Spec TELLING = {
    .name = "headgate.adapters._asgi.TellingSend",
    .basicsize = sizeof(Telling),
    /* Only by `telling_made`: one that was never made would have nothing to send by. */
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = TELLING_SLOTS,
};

/* -- SENT: what to await, or to make a task of, where nothing is left to wait for ---------------------------------- */

static PySendResult
sent_send_on(PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(value), PyObject **result)
{
    *result = Py_NewRef(Py_None);
    return PYGEN_RETURN;
}

static PyObject *
sent_await(PyObject *object)
{
    return Py_NewRef(object);
}

static PyObject *
sent_next(PyObject *Py_UNUSED(object))
{
    return NULL; /* which is StopIteration */
}

static PyObject *
sent_send(PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(value))
{
    PyErr_SetNone(PyExc_StopIteration);
    return NULL;
}

static PyObject *
sent_throw(PyObject *Py_UNUSED(object), PyObject *const *args, Py_ssize_t number)
{
    if (number < 1 || number > 3) {
        return PyErr_Format(PyExc_TypeError, "throw() takes one to three arguments, not %zd", number);
    }
    raise(args, number);
    return NULL;
}

static PyObject *
sent_close(PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(nothing))
{
    Py_RETURN_NONE;
}

static PyMethodDef SENT_METHODS[] = {
    {"send", sent_send, METH_O, "send($self, value, /)\n--\n\nStopIteration: there is nothing to wait for."},
    {"throw", (PyCFunction)(void (*)(void))sent_throw, METH_FASTCALL,
     "throw($self, kind, error=None, traceback=None, /)\n--\n\nRaise it."},
    {"close", sent_close, METH_NOARGS, "close($self, /)\n--\n\nThere is nothing to end."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SENT_SLOTS[] = {
    {Py_am_await, sent_await},
    {Py_am_send, sent_send_on},
    {Py_tp_iter, sent_await},
    {Py_tp_iternext, sent_next},
    {Py_tp_methods, SENT_METHODS},
    {Py_tp_doc, "What to await where nothing is left to wait for."},
    {0, NULL},
};

static PyType_Spec SENT = {
    .name = "headgate.adapters._asgi.Sent",
    .basicsize = sizeof(PyObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = SENT_SLOTS,
};

/* -- The module ---------------------------------------------------------------------------------------------------- */

static int
begin(PyObject *module)
{
    Names *known = PyModule_GetState(module);
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&known->method, "method"}, {&known->path, "path"},       {&known->root_path, "root_path"},
        {&known->client, "client"}, {&known->headers, "headers"}, {&known->type, "type"},
        {&known->no_root, ""},      {&known->more_body, "more_body"},
    };
    for (size_t index = 0; index < sizeof(names) / sizeof(names[0]); index++) {
        *names[index].name = PyUnicode_InternFromString(names[index].text);
        if (*names[index].name == NULL) {
            return -1;
        }
    }
    known->placed = taken_from("headgate.adapters.mounts", "placed");
    known->current = known->placed == NULL ? NULL : taken_from("headgate.adapters.way", "_current");
    known->nobody = known->current == NULL ? NULL : taken_from("headgate.adapters.way", "FREE");
    known->admission_type = known->nobody == NULL ? NULL : (PyTypeObject *)Py_NewRef(Py_TYPE(known->nobody));
    known->decision_type = known->admission_type == NULL ? NULL : decision_class();
    if (known->decision_type == NULL || !find_slot(known->admission_type, "decision", &known->decision_at) ||
        !find_slot(known->admission_type, "_description", &known->description_at)) {
        return -1;
    }
    known->arrival_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &ARRIVAL, NULL);
    known->telling_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &TELLING, NULL);
    if (known->arrival_type == NULL || known->telling_type == NULL) {
        return -1;
    }
    known->arrival_type->tp_vectorcall = arrival_made;
    known->telling_type->tp_vectorcall = telling_made;
    known->fields = calls_of("headgate.adapters._fields", FIELDS_CALLS, &known->fields_module);
    PyErr_Clear();
    known->calls =
        (AsgiCalls){known, known->arrival_type, read_request, lines_of, arrival_of, telling_of, leave};
    PyTypeObject *sent_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &SENT, NULL);
    known->sent = sent_type == NULL ? NULL : sent_type->tp_alloc(sent_type, 0);
    Py_XDECREF(sent_type);
    return known->sent == NULL || PyModule_AddObjectRef(module, "SENT", known->sent) < 0 ||
                   PyModule_AddType(module, known->arrival_type) < 0 ||
                   PyModule_AddType(module, known->telling_type) < 0
               ? -1
               : add_calls(module, &known->calls, ASGI_CALLS);
}

static int
visit(PyObject *module, visitproc visit, void *arg)
{
    Names *known = PyModule_GetState(module);
    Py_VISIT(known->arrival_type);
    Py_VISIT(known->telling_type);
    Py_VISIT(known->admission_type);
    Py_VISIT(known->decision_type);
    Py_VISIT(known->placed);
    Py_VISIT(known->current);
    Py_VISIT(known->nobody);
    Py_VISIT(known->sent);
    Py_VISIT(known->go_on);
    Py_VISIT(known->wait_for);
    Py_VISIT(known->fields_module);
    Py_VISIT(known->headers_in_description.type);
    return 0;
}

static int
clear(PyObject *module)
{
    Names *known = PyModule_GetState(module);
    Py_CLEAR(known->arrival_type);
    Py_CLEAR(known->telling_type);
    Py_CLEAR(known->admission_type);
    Py_CLEAR(known->decision_type);
    Py_CLEAR(known->placed);
    Py_CLEAR(known->current);
    Py_CLEAR(known->nobody);
    Py_CLEAR(known->sent);
    Py_CLEAR(known->go_on);
    Py_CLEAR(known->wait_for);
    Py_CLEAR(known->fields_module);
    Py_CLEAR(known->headers_in_description.type);
    Py_CLEAR(known->more_body);
    Py_CLEAR(known->method);
    Py_CLEAR(known->path);
    Py_CLEAR(known->root_path);
    Py_CLEAR(known->client);
    Py_CLEAR(known->headers);
    Py_CLEAR(known->type);
    Py_CLEAR(known->no_root);
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
    .m_name = "headgate.adapters._asgi",
    .m_doc = "What an ASGI server hands over, and what goes back to it, compiled.",
    .m_size = sizeof(Names),
    .m_slots = MODULE_SLOTS,
    .m_traverse = visit,
    .m_clear = clear,
    .m_free = end,
};

PyMODINIT_FUNC
PyInit__asgi(void)
{
    return PyModuleDef_Init(&MODULE);
}
