/* How a request passes the gate of an ASGI app, from its first step to its last, in C. Mirrors the middleware in
 * asgi.py and, for who is counted in Redis, `admit` in gate.py and `_decide` in limiter.py, which say what it means;
 * whatever is unusual is left to them. */
#include "../_decision.h"
#include "_calls.h"

enum { KNOWN_FIELDS = 5, MOST_SPARE = 256 };

/* The fields of what `recognize` tells. */
enum { KNOWN_PLAN = 0, KNOWN_CHECK = 2 };

/* The fields of `Door._asking`. */
enum { ASKING_WAY, ASKING_FRONT, ASKING_CLOCK, ASKING_RUN, ASKING_FIELDS };

/* What is asked for by name. */
#define FOR_EACH_NAME(DO)                                                                                              \
    DO(_serve) DO(_let_in) DO(admit) DO(_failed) DO(is_alert) DO(look) DO(answered) DO(throw) DO(close) DO(type)       \
    DO(value)

typedef struct {
    PyTypeObject *passage_type;
    PyTypeObject *admission_type;
    PyTypeObject *decision_type;
    PyTypeObject *plan_type;
    PyObject *store_error;
    PyObject *free;
    PyObject *one;
    const AsgiCalls *asgi;
    const WayCalls *ways;
    PyObject *asgi_module;
    PyObject *way_module;
    /* A check whose number has none of these bits is looked at. */
    unsigned long long looks;
#define DECLARED(name) PyObject *name;
    FOR_EACH_NAME(DECLARED)
#undef DECLARED
    /* Where admissions and plans keep what is asked of them. */
    Py_ssize_t refusal_at;
    Py_ssize_t is_over_at;
    Py_ssize_t leases_at;
    Py_ssize_t shadows_at;
    Place split_place;
    Place checks_place;
    Place alert_place;
    Place short_way_place;
    Place asking_place;
    /* Room for passages to come, left by those that are over. */
    struct Passage *spare[MOST_SPARE];
    int spares;
} Names;

/* What a middleware is below: an app, the gate before it, and the path at which it is mounted. */
typedef struct {
    PyObject_HEAD
    Names *names;
    PyObject *app;
    PyObject *gate;
    PyObject *root;
} Entrance;

/* A request on its way. One object, made of one before, instead of a coroutine for each step: while many requests wait
 * for the store, Python's collector counts all that they keep, and has to look through it the more often. */
typedef struct Passage {
    PyObject_HEAD
    Names *names;
    enum { BEFORE, ASKED, ADMITTING, SERVED, OVER } state;
    bool is_going;
    Entrance *middleware;
    PyObject *scope;
    PyObject *receive;
    PyObject *send;
    /* What is waited for: the store, the gate, or the app. NULL before and after. */
    PyObject *waiting;
    /* While the store is: who has asked it, what about, by which way that was found, and when. */
    PyObject *gate;
    PyObject *front;
    PyObject *way;
    PyObject *known;
    PyObject *asked_ns;
    /* While the app is: what tells its client of the admission, if that is to be told. */
    PyObject *telling;
} Passage;

static struct PyModuleDef MODULE;

/* -- To wait ------------------------------------------------------------------------------------------------------- */

/* Wait for something from now on; the reference is taken. False, with an exception, where that cannot be awaited. */
static bool
wait_for(Passage *self, PyObject *awaitable)
{
    if (awaitable == NULL) {
        return false;
    }
    if (PyCoro_CheckExact(awaitable)) {
        Py_XSETREF(self->waiting, awaitable);
        return true;
    }
    PyAsyncMethods *methods = Py_TYPE(awaitable)->tp_as_async;
    PyObject *waiting = NULL;
    if (methods == NULL || methods->am_await == NULL) {
        PyErr_Format(PyExc_TypeError, "object %s can't be used in 'await' expression", Py_TYPE(awaitable)->tp_name);
    }
    else {
        waiting = methods->am_await(awaitable);
    }
    Py_DECREF(awaitable);
    if (waiting != NULL && !PyIter_Check(waiting)) {
        PyErr_Format(PyExc_TypeError, "__await__() returned non-iterator of type '%s'", Py_TYPE(waiting)->tp_name);
        Py_CLEAR(waiting);
    }
    Py_XSETREF(self->waiting, waiting);
    return waiting != NULL;
}

/* Let go of all that it has: whoever waited has been told. */
static void
let_go(Passage *self)
{
    self->state = OVER;
    Py_CLEAR(self->waiting);
    Py_CLEAR(self->gate);
    Py_CLEAR(self->front);
    Py_CLEAR(self->way);
    Py_CLEAR(self->known);
    Py_CLEAR(self->asked_ns);
    Py_CLEAR(self->telling);
    Py_CLEAR(self->middleware);
    Py_CLEAR(self->scope);
    Py_CLEAR(self->receive);
    Py_CLEAR(self->send);
}

/* The end, with or without an exception, which stays: servers may serve the next request of a connection in the same
 * task, in which this admission is current no more. False if there is an exception. */
static bool
end(const Names *known, Passage *self)
{
    PyObject *type = NULL, *error = NULL, *traceback = NULL;
    if (PyErr_Occurred()) {
        PyErr_Fetch(&type, &error, &traceback);
    }
    bool is_left = self->telling == NULL || known->asgi->leave(known->asgi->known, self->telling);
    let_go(self);
    if (type == NULL) {
        return is_left;
    }
    if (is_left) {
        PyErr_Restore(type, error, traceback);
        return false;
    }
    Py_DECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return false;
}

/* -- Its steps: each leads to something to wait for, or is false, with an exception -------------------------------- */

/* A new reference to what the middleware has; NULL, with an exception, if somebody has taken that away. */
static PyObject *
own(PyObject *part, const char *name)
{
    return part == NULL ? PyErr_Format(PyExc_AttributeError, "the middleware has no %s", name) : Py_NewRef(part);
}

/* Have the app serve it, or refuse it: what follows the admission. */
static bool
serve(const Names *known, Passage *self, PyObject *admission)
{
    PyObject *send = self->send;
    self->state = SERVED;
    if (!Py_IS_TYPE(admission, known->admission_type) || slot(admission, known->refusal_at) != Py_None ||
        slot(admission, known->is_over_at) != Py_True) {
        PyObject *const args[] = {(PyObject *)self->middleware, admission, self->scope, self->receive, send};
        return wait_for(self, PyObject_VectorcallMethod(known->_let_in, args, 5, NULL));
    }
    if (admission != known->free) {
        send = self->telling = known->asgi->telling(known->asgi->known, send, admission);
    }
    PyObject *app = send == NULL ? NULL : own(self->middleware->app, "app");
    if (app == NULL) {
        return false;
    }
    PyObject *const args[] = {self->scope, self->receive, send};
    bool is_served = wait_for(self, PyObject_Vectorcall(app, args, 3, NULL));
    Py_DECREF(app);
    return is_served;
}

/* The same with a new reference, or NULL with an exception. */
static bool
serve_by(const Names *known, Passage *self, PyObject *admission)
{
    bool is_served = admission != NULL && serve(known, self, admission);
    Py_XDECREF(admission);
    return is_served;
}

/* Whether one check is all that the store is asked for the request. */
static bool
is_one_question(const Names *known, PyObject *said)
{
    if (!PyTuple_CheckExact(said) || PyTuple_GET_SIZE(said) != KNOWN_FIELDS) {
        return false;
    }
    PyObject *plan = PyTuple_GET_ITEM(said, KNOWN_PLAN), *shadows;
    return PyTuple_GET_ITEM(said, KNOWN_CHECK) != Py_None && Py_IS_TYPE(plan, known->plan_type) &&
           slot(plan, known->leases_at) == Py_False && (shadows = slot(plan, known->shadows_at)) != NULL &&
           PyTuple_CheckExact(shadows) && PyTuple_GET_SIZE(shadows) == 0;
}

/* Whether each limit is counted in one place. */
static bool
is_whole(Names *known, PyObject *check)
{
    PyObject *keys = PyTuple_Check(check) && PyTuple_GET_SIZE(check) > 0 ? PyTuple_GET_ITEM(check, 0) : NULL;
    bool is = keys != NULL && PyTuple_CheckExact(keys);
    for (Py_ssize_t index = 0; is && index < PyTuple_GET_SIZE(keys); index++) {
        PyObject *key = PyTuple_GET_ITEM(keys, index);
        bool has_limit = PyTuple_Check(key) && PyTuple_GET_SIZE(key) > 0;
        PyObject *parts = has_limit ? kept_in(&known->split_place, PyTuple_GET_ITEM(key, 0), "split") : NULL;
        is = parts != NULL && PyLong_CheckExact(parts) && PyLong_AsLong(parts) == 1;
    }
    return is;
}

/* Whether there is more to know than what the store says: 1 or 0, or -1 with an exception. */
static int
is_alert(Names *known, PyObject *front)
{
    return is_kept_true(&known->alert_place, front, known->is_alert, "is_alert");
}

/* Count the check, and have one in so many looked at. False with an exception. */
static bool
count(Names *known, PyObject *front, PyObject *check)
{
    PyObject **counted = slot_in(&known->checks_place, front, "checks");
    if (counted == NULL || *counted == NULL) {
        PyErr_SetString(PyExc_TypeError, "the front of a gate has to count its checks");
        return false;
    }
    PyObject *checks = PyNumber_Add(*counted, known->one), *looked = NULL;
    if (checks == NULL) {
        return false;
    }
    bool is_looked_at = !(PyLong_AsUnsignedLongLongMask(checks) & known->looks);
    Py_SETREF(*counted, checks);
    if (is_looked_at && !PyErr_Occurred()) {
        looked = PyObject_CallMethodOneArg(front, known->look, check);
        Py_XDECREF(looked);
    }
    return !PyErr_Occurred();
}

/* What to await for the store's decision, where that is all there is to `_decide`; a new reference. NULL, with or
 * without an exception, where there is more, and nobody has been asked. */
static PyObject *
asked_for(Names *known, PyObject *front, PyObject *run, PyObject *check)
{
    if (is_alert(known, front) != 0 || !is_whole(known, check) || !count(known, front, check)) {
        return NULL;
    }
    PyObject *asked = PyObject_CallOneArg(run, check);
    if (asked == NULL && PyErr_ExceptionMatches(known->store_error)) {
        PyErr_Clear(); /* it does not serve: the long way hears that, too, and knows what to do */
    }
    return asked;
}

/* Ask the store, if the request is like one before, and there is no more to it than that. False if there is, or with an
 * exception. */
static bool
ask(Names *known, Passage *self, PyObject *gate, PyObject *asking, const Request *request)
{
    if (!PyTuple_CheckExact(asking) || PyTuple_GET_SIZE(asking) != ASKING_FIELDS) {
        PyErr_SetString(PyExc_TypeError, "the gate has to say who asks, by a tuple of four");
        return false;
    }
    PyObject *way = PyTuple_GET_ITEM(asking, ASKING_WAY), *front = PyTuple_GET_ITEM(asking, ASKING_FRONT);
    if (!Py_IS_TYPE(way, known->ways->way_type)) {
        return false;
    }
    PyObject *said = known->ways->recognize(known->ways->known, way, request), *asked_ns = NULL, *asked = NULL;
    if (said != NULL && is_one_question(known, said)) {
        asked_ns = PyObject_CallNoArgs(PyTuple_GET_ITEM(asking, ASKING_CLOCK));
    }
    if (asked_ns != NULL) {
        PyObject *run = PyTuple_GET_ITEM(asking, ASKING_RUN);
        asked = asked_for(known, front, run, PyTuple_GET_ITEM(said, KNOWN_CHECK));
    }
    if (asked == NULL) {
        Py_XDECREF(said);
        Py_XDECREF(asked_ns);
        return false;
    }
    self->state = ASKED;
    self->gate = Py_NewRef(gate);
    self->front = Py_NewRef(front);
    self->way = Py_NewRef(way);
    self->known = said;
    self->asked_ns = asked_ns;
    return wait_for(self, asked);
}

/* What the gate keeps in that slot, if that is not None; a new reference, or NULL. */
static PyObject *
somebody(Place *place, PyObject *gate, const char *name)
{
    PyObject *there = kept_in(place, gate, name);
    return there == NULL || there == Py_None ? NULL : Py_NewRef(there);
}

/* How it is let in, or None where the gate has more to ask, or NULL with an exception. */
static PyObject *
short_admission(const Names *known, PyObject *short_way, const Request *request)
{
    return Py_IS_TYPE(short_way, known->ways->way_type) ? known->ways->admit(known->ways->known, short_way, request)
                                                        : Py_NewRef(Py_None);
}

/* Have the gate say how it is let in. */
static bool
arrive(Names *known, Passage *self, PyObject *gate, Request *request)
{
    PyObject *short_way = somebody(&known->short_way_place, gate, "short_way");
    if (short_way != NULL) {
        PyObject *admission = short_admission(known, short_way, request);
        Py_DECREF(short_way);
        if (admission != Py_None) {
            return serve_by(known, self, admission);
        }
        Py_DECREF(admission);
    }
    else {
        PyObject *asking = somebody(&known->asking_place, gate, "_asking");
        bool is_asked = asking != NULL && ask(known, self, gate, asking, request);
        Py_XDECREF(asking);
        if (is_asked || PyErr_Occurred()) {
            return is_asked;
        }
    }
    PyObject *arrival = PyErr_Occurred() ? NULL : known->asgi->arrival(known->asgi->known, request);
    self->state = ADMITTING;
    bool is_waited_for = arrival != NULL && wait_for(self, PyObject_CallMethodOneArg(gate, known->admit, arrival));
    Py_XDECREF(arrival);
    return is_waited_for;
}

/* 1 for what a gate has to do with, 0 for anything else, -1 with an exception. */
static int
is_request(const Names *known, PyObject *scope)
{
    PyObject *type = item_of(scope, known->type);
    int is = type == NULL ? -1 : IS_TEXT(type, "http") || IS_TEXT(type, "websocket");
    Py_XDECREF(type);
    return is;
}

static bool
begin_passage(Names *known, Passage *self)
{
    int is = is_request(known, self->scope);
    if (is <= 0) {
        self->state = SERVED;
        PyObject *const args[] = {(PyObject *)self->middleware, self->scope, self->receive, self->send};
        return is == 0 && wait_for(self, PyObject_VectorcallMethod(known->_serve, args, 4, NULL));
    }
    PyObject *root = own(self->middleware->root, "_root"), *gate = NULL;
    Request request = {0};
    if (root != NULL && known->asgi->read(known->asgi->known, &request, self->scope, root)) {
        gate = own(self->middleware->gate, "gate");
    }
    bool is_begun = gate != NULL && arrive(known, self, gate, &request);
    let_go_of(&request);
    Py_XDECREF(root);
    Py_XDECREF(gate);
    return is_begun;
}

/* Whether a decision says more than that the request may pass now, of which the gate's front is to hear; -1 with an
 * exception. */
static int
is_news(Names *known, PyObject *front, PyObject *decision)
{
    if (!is_decision(decision, known->decision_type) || PyTuple_GET_ITEM(decision, SAID_ALLOWED) != Py_True) {
        return 1;
    }
    int is = PyObject_IsTrue(PyTuple_GET_ITEM(decision, SAID_AGAIN_US));
    return is == 0 ? is_alert(known, front) : is;
}

/* The store has decided. */
static bool
be_told(Names *known, Passage *self, PyObject *decision)
{
    int is = is_news(known, self->front, decision);
    if (is > 0) {
        PyObject *check = PyTuple_GET_ITEM(self->known, KNOWN_CHECK);
        PyObject *heard =
            PyObject_CallMethodObjArgs(self->front, known->answered, check, decision, self->asked_ns, NULL);
        is = heard == NULL ? -1 : 1;
        Py_XDECREF(heard);
    }
    if (is < 0) {
        return false;
    }
    return serve_by(known, self, known->ways->conclude(known->ways->known, self->way, self->known, decision));
}

/* The store has failed, which is the exception that is raised now. */
static bool
do_without(const Names *known, Passage *self)
{
    PyObject *type, *error, *traceback, *admission = NULL;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
    PyObject *plan = PyTuple_GET_ITEM(self->known, KNOWN_PLAN), *check = PyTuple_GET_ITEM(self->known, KNOWN_CHECK);
    PyObject *decision = PyObject_CallMethodObjArgs(self->gate, known->_failed, plan, check, error, NULL);
    if (decision != NULL) {
        admission = known->ways->conclude(known->ways->known, self->way, self->known, decision);
        Py_DECREF(decision);
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return serve_by(known, self, admission);
}

/* What was waited for before the app is over: with an answer, or with the exception that is raised now. */
static bool
advance(Names *known, Passage *self, PyObject *answer)
{
    if (answer == NULL) {
        return self->state == ASKED && PyErr_ExceptionMatches(known->store_error) && do_without(known, self);
    }
    return self->state == ASKED ? be_told(known, self, answer) : serve(known, self, answer);
}

/* -- To be awaited ------------------------------------------------------------------------------------------------- */

/* Go on until there is something to wait for, or nothing more to do; given what became of what was waited for. The
 * answer's reference is taken. */
static PySendResult
go_on(Passage *self, PySendResult how, PyObject **answer, PyObject **result)
{
    Names *known = self->names;
    while (how != PYGEN_NEXT) {
        bool is_advanced = self->state != SERVED && advance(known, self, how == PYGEN_RETURN ? *answer : NULL);
        Py_CLEAR(*answer);
        if (!is_advanced) {
            *result = end(known, self) ? Py_NewRef(Py_None) : NULL;
            return *result == NULL ? PYGEN_ERROR : PYGEN_RETURN;
        }
        how = PyIter_Send(self->waiting, Py_None, answer);
    }
    *result = *answer;
    return PYGEN_NEXT;
}

/* Set out, unless it is on its way at this moment: then what it waits for must not be taken from under it. False, with
 * an exception. */
static bool
set_out(Passage *self)
{
    if (self->is_going) {
        PyErr_SetString(PyExc_ValueError, "the passage is already executing");
        return false;
    }
    return self->is_going = true;
}

static PySendResult
passage_send_on(PyObject *object, PyObject *value, PyObject **result)
{
    Passage *self = (Passage *)object;
    Names *known = self->names;
    PyObject *answer = NULL;
    PySendResult how = PYGEN_ERROR;
    *result = NULL;
    if (!set_out(self)) {
        return PYGEN_ERROR;
    }
    if (self->state == OVER) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited passage");
    }
    else if (self->state != BEFORE) {
        how = go_on(self, PyIter_Send(self->waiting, value, &answer), &answer, result);
    }
    else if (begin_passage(known, self)) {
        how = go_on(self, PyIter_Send(self->waiting, Py_None, &answer), &answer, result);
    }
    else {
        end(known, self);
    }
    self->is_going = false;
    return how;
}

/* The same as the methods of coroutines tell it: what is waited for, or StopIteration. */
static PyObject *
as_method(PySendResult how, PyObject *result)
{
    if (how == PYGEN_RETURN) {
        Py_CLEAR(result);
        PyErr_SetNone(PyExc_StopIteration);
    }
    return result;
}

static PyObject *
passage_send(PyObject *object, PyObject *value)
{
    PyObject *result;
    PySendResult how = passage_send_on(object, value, &result);
    return as_method(how, result);
}

static PyObject *
passage_next(PyObject *object)
{
    return passage_send(object, Py_None);
}

/* Throw it into what is waited for, which may wait on. */
static PySendResult
throw_on(const Names *known, PyObject *waiting, PyObject *const *args, Py_ssize_t number, PyObject **answer)
{
    PyObject *throw = PyObject_GetAttr(waiting, known->throw);
    *answer = throw == NULL ? NULL : PyObject_Vectorcall(throw, args, (size_t)number, NULL);
    if (throw == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        raise(args, number);
    }
    Py_XDECREF(throw);
    if (*answer != NULL || !PyErr_ExceptionMatches(PyExc_StopIteration)) {
        return *answer == NULL ? PYGEN_ERROR : PYGEN_NEXT;
    }
    PyObject *type, *stop, *traceback;
    PyErr_Fetch(&type, &stop, &traceback);
    PyErr_NormalizeException(&type, &stop, &traceback);
    *answer = PyObject_GetAttr(stop, known->value);
    Py_XDECREF(type);
    Py_XDECREF(stop);
    Py_XDECREF(traceback);
    return *answer == NULL ? PYGEN_ERROR : PYGEN_RETURN;
}

PyDoc_STRVAR(throw_doc, "throw($self, kind, error=None, traceback=None, /)\n--\n\n"
                        "Have what is waited for go on with an exception.");

static PyObject *
passage_throw(PyObject *object, PyObject *const *args, Py_ssize_t number)
{
    Passage *self = (Passage *)object;
    PyObject *answer = NULL, *result = NULL;
    if (number < 1 || number > 3) {
        return PyErr_Format(PyExc_TypeError, "throw() takes one to three arguments, not %zd", number);
    }
    if (!set_out(self)) {
        return NULL;
    }
    const Names *known = self->names;
    PySendResult how = PYGEN_ERROR;
    if (self->waiting == NULL) {
        raise(args, number);
        end(known, self);
    }
    else {
        how = throw_on(known, self->waiting, args, number, &answer);
        how = go_on(self, how, &answer, &result);
    }
    self->is_going = false;
    return as_method(how, result);
}

static PyObject *
passage_close(PyObject *object, PyObject *Py_UNUSED(nothing))
{
    Passage *self = (Passage *)object;
    if (!set_out(self)) {
        return NULL;
    }
    const Names *known = self->names;
    PyObject *close = self->waiting == NULL ? NULL : PyObject_GetAttr(self->waiting, known->close);
    if (close != NULL) {
        Py_XDECREF(PyObject_CallNoArgs(close));
        Py_DECREF(close);
    }
    else if (self->waiting != NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
    }
    bool is_closed = end(known, self);
    self->is_going = false;
    return is_closed ? Py_NewRef(Py_None) : NULL;
}

static PyObject *
itself(PyObject *object)
{
    return Py_NewRef(object);
}

/* -- Passage ------------------------------------------------------------------------------------------------------- */

static PyObject *
made_passage(Names *known, Entrance *middleware, PyObject *scope, PyObject *receive, PyObject *send)
{
    Passage *self;
    if (known->spares > 0) {
        self = (Passage *)PyObject_Init((PyObject *)known->spare[--known->spares], known->passage_type);
    }
    else {
        self = PyObject_GC_New(Passage, known->passage_type);
    }
    if (self != NULL) {
        self->names = known;
        self->state = BEFORE;
        self->is_going = false;
        self->middleware = (Entrance *)Py_NewRef(middleware);
        self->scope = Py_NewRef(scope);
        self->receive = Py_NewRef(receive);
        self->send = Py_NewRef(send);
        self->waiting = self->gate = self->front = self->way = self->known = self->asked_ns = self->telling = NULL;
        PyObject_GC_Track(self);
    }
    return (PyObject *)self;
}

static int
passage_traverse(PyObject *object, visitproc visit, void *arg)
{
    Passage *self = (Passage *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->middleware);
    Py_VISIT(self->scope);
    Py_VISIT(self->receive);
    Py_VISIT(self->send);
    Py_VISIT(self->waiting);
    Py_VISIT(self->gate);
    Py_VISIT(self->front);
    Py_VISIT(self->way);
    Py_VISIT(self->known);
    Py_VISIT(self->asked_ns);
    Py_VISIT(self->telling);
    return 0;
}

static int
passage_clear(PyObject *object)
{
    let_go((Passage *)object);
    return 0;
}

static void
passage_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Names *known = ((Passage *)object)->names;
    PyObject_GC_UnTrack(object);
    let_go((Passage *)object);
    if (known->spares < MOST_SPARE) {
        known->spare[known->spares++] = (Passage *)object;
    }
    else {
        PyObject_GC_Del(object);
    }
    Py_DECREF(type);
}

static PyMethodDef PASSAGE_METHODS[] = {
    {"send", passage_send, METH_O, "send($self, value, /)\n--\n\nGo on: what is waited for, or StopIteration."},
    {"throw", (PyCFunction)(void (*)(void))passage_throw, METH_FASTCALL, throw_doc},
    {"close", passage_close, METH_NOARGS, "close($self, /)\n--\n\nGo no further."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot PASSAGE_SLOTS[] = {
    {Py_am_await, itself},
    {Py_am_send, passage_send_on},
    {Py_tp_iter, itself},
    {Py_tp_iternext, passage_next},
    {Py_tp_methods, PASSAGE_METHODS},
    {Py_tp_traverse, passage_traverse},
    {Py_tp_clear, passage_clear},
    {Py_tp_dealloc, passage_dealloc},
    {Py_tp_doc, "What to await for a request to be served."},
    {0, NULL},
};

static PyType_Spec PASSAGE = {
    .name = "headgate.adapters._passage.Passage",
    .basicsize = sizeof(Passage),
    /* Only by `entrance_call`: one that was never made would have nobody to serve. */
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = PASSAGE_SLOTS,
};

/* -- Entrance: no step of Python is between a server and a passage ------------------------------------------------- */

static PyObject *
entrance_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    Entrance *self = (Entrance *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->names = PyModule_GetState(PyType_GetModuleByDef(type, &MODULE));
    }
    return (PyObject *)self;
}

static PyObject *
entrance_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"scope", "receive", "send", NULL};
    Entrance *self = (Entrance *)object;
    Names *known = self->names;
    PyObject *scope, *receive, *send;
    if (kwargs == NULL && PyTuple_GET_SIZE(args) == 3) { /* as all servers do */
        return made_passage(known, self, PyTuple_GET_ITEM(args, 0), PyTuple_GET_ITEM(args, 1),
                            PyTuple_GET_ITEM(args, 2));
    }
    return PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", names, &scope, &receive, &send)
               ? made_passage(known, self, scope, receive, send)
               : NULL;
}

static int
entrance_traverse(PyObject *object, visitproc visit, void *arg)
{
    Entrance *self = (Entrance *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->app);
    Py_VISIT(self->gate);
    Py_VISIT(self->root);
    return 0;
}

static int
entrance_clear(PyObject *object)
{
    Entrance *self = (Entrance *)object;
    Py_CLEAR(self->app);
    Py_CLEAR(self->gate);
    Py_CLEAR(self->root);
    return 0;
}

static void
entrance_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    entrance_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef ENTRANCE_MEMBERS[] = {
    {"app", T_OBJECT_EX, offsetof(Entrance, app), 0, NULL},
    {"gate", T_OBJECT_EX, offsetof(Entrance, gate), 0, NULL},
    {"_root", T_OBJECT_EX, offsetof(Entrance, root), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot ENTRANCE_SLOTS[] = {
    {Py_tp_new, entrance_new},
    {Py_tp_call, entrance_call},
    {Py_tp_members, ENTRANCE_MEMBERS},
    {Py_tp_traverse, entrance_traverse},
    {Py_tp_clear, entrance_clear},
    {Py_tp_dealloc, entrance_dealloc},
    {Py_tp_doc, "An app whose requests pass in C."},
    {0, NULL},
};

static PyType_Spec ENTRANCE = {
    .name = "headgate.adapters._passage.Entrance",
    .basicsize = sizeof(Entrance),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = ENTRANCE_SLOTS,
};

/* -- The module ---------------------------------------------------------------------------------------------------- */

static bool
find_classes(Names *known)
{
    known->asgi = calls_of("headgate.adapters._asgi", ASGI_CALLS, &known->asgi_module);
    known->ways =
        known->asgi == NULL ? NULL : calls_of("headgate.adapters._short_way", WAY_CALLS, &known->way_module);
    known->store_error = known->ways == NULL ? NULL : taken_from("headgate.errors", "StoreError");
    known->free = known->store_error == NULL ? NULL : taken_from("headgate.adapters.way", "FREE");
    known->admission_type = known->free == NULL ? NULL : (PyTypeObject *)Py_NewRef(Py_TYPE(known->free));
    known->plan_type =
        (PyTypeObject *)(known->free == NULL ? NULL : taken_from("headgate.policy.snapshot", "RoutePlan"));
    known->decision_type = known->plan_type == NULL ? NULL : decision_class();
    known->one = known->decision_type == NULL ? NULL : PyLong_FromLong(1);
    PyObject *looks = known->one == NULL ? NULL : taken_from("headgate.shield.front", "LOOKS");
    known->looks = looks == NULL ? 0 : PyLong_AsUnsignedLongLongMask(looks);
    Py_XDECREF(looks);
    return looks != NULL && find_slot(known->admission_type, "refusal", &known->refusal_at) &&
           find_slot(known->admission_type, "is_over", &known->is_over_at) &&
           find_slot(known->plan_type, "leases", &known->leases_at) &&
           find_slot(known->plan_type, "shadows", &known->shadows_at);
}

static int
begin(PyObject *module)
{
    Names *known = PyModule_GetState(module);
#ifdef Py_GIL_DISABLED
    PyErr_SetString(PyExc_ImportError, "without Python's own lock, somebody may change what is read here");
    return -1;
#endif
#define MADE(name)                                                                                                     \
    known->name = PyUnicode_InternFromString(#name);                                                                   \
    if (known->name == NULL) {                                                                                         \
        return -1;                                                                                                     \
    }
    FOR_EACH_NAME(MADE)
#undef MADE
    if (!find_classes(known)) {
        return -1;
    }
    known->passage_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &PASSAGE, NULL);
    if (known->passage_type == NULL) {
        return -1;
    }
    PyObject *entrance = PyType_FromModuleAndSpec(module, &ENTRANCE, NULL);
    int is_added = entrance == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)entrance);
    Py_XDECREF(entrance);
    return is_added < 0 ? -1 : PyModule_AddType(module, known->passage_type);
}

static int
visit(PyObject *module, visitproc visit, void *arg)
{
    Names *known = PyModule_GetState(module);
    Py_VISIT(known->passage_type);
    Py_VISIT(known->admission_type);
    Py_VISIT(known->decision_type);
    Py_VISIT(known->plan_type);
    Py_VISIT(known->asgi_module);
    Py_VISIT(known->way_module);
    Py_VISIT(known->store_error);
    Py_VISIT(known->free);
    Py_VISIT(known->split_place.type);
    Py_VISIT(known->checks_place.type);
    Py_VISIT(known->alert_place.type);
    Py_VISIT(known->short_way_place.type);
    Py_VISIT(known->asking_place.type);
    return 0;
}

static int
clear(PyObject *module)
{
    Names *known = PyModule_GetState(module);
    while (known->spares > 0) {
        PyObject_GC_Del(known->spare[--known->spares]);
    }
    Py_CLEAR(known->passage_type);
    Py_CLEAR(known->admission_type);
    Py_CLEAR(known->decision_type);
    Py_CLEAR(known->plan_type);
    Py_CLEAR(known->asgi_module);
    Py_CLEAR(known->way_module);
    Py_CLEAR(known->store_error);
    Py_CLEAR(known->free);
    Py_CLEAR(known->one);
    Py_CLEAR(known->split_place.type);
    Py_CLEAR(known->checks_place.type);
    Py_CLEAR(known->alert_place.type);
    Py_CLEAR(known->short_way_place.type);
    Py_CLEAR(known->asking_place.type);
#define CLEARED(name) Py_CLEAR(known->name);
    FOR_EACH_NAME(CLEARED)
#undef CLEARED
    return 0;
}

static void
end_module(void *module)
{
    clear(module);
}

static PyModuleDef_Slot MODULE_SLOTS[] = {{Py_mod_exec, begin}, KEEPS_TO_ITSELF, {0, NULL}};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "headgate.adapters._passage",
    .m_doc = "How a request passes the gate of an ASGI app, compiled.",
    .m_size = sizeof(Names),
    .m_slots = MODULE_SLOTS,
    .m_traverse = visit,
    .m_clear = clear,
    .m_free = end_module,
};

PyMODINIT_FUNC
PyInit__passage(void)
{
    return PyModuleDef_Init(&MODULE);
}
