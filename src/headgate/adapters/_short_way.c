/* The short way of a request through the gate, in C: of one like one before, whose counts are in this process. Mirrors
 * `admit` in gate.py, which says what it means; whatever is unusual is left to it, by answering None before anything
 * has changed. */
#include "../stores/_meter.h"
#include "_calls.h"

enum { MEETING_FIELDS = 3, CHECK_FIELDS = 3, PERIOD_FIELDS = 3, SENT_FIELDS = 6 };

/* What every request is asked for, by name. */
#define FOR_EACH_NAME(DO)                                                                                              \
    DO(method) DO(path) DO(below) DO(peer) DO(header) DO(headers) DO(are_there) DO(_busy) DO(conclude) DO(api_key)

/* What an admission is made of, each in its slot. */
#define FOR_EACH_PART(DO)                                                                                              \
    DO(came_us) DO(resolution) DO(decision) DO(refusal) DO(is_over) DO(shadows) DO(held) DO(_description) DO(_committed)

typedef struct {
    PyTypeObject *way_type;
    PyTypeObject *plan_type;
    PyTypeObject *rules_type;
    PyTypeObject *admission_type;
    PyTypeObject *decision_type;
    PyObject *free;
    PyObject *nothing;
    PyObject *no_lines;
    PyObject *zero;
#define DECLARED(name) PyObject *name;
    FOR_EACH_NAME(DECLARED)
#undef DECLARED
    /* Where plans and rules, whose classes have slots, keep what is asked of them. */
    Py_ssize_t is_exempt_at;
    Py_ssize_t leases_at;
    Py_ssize_t watches_at;
    Py_ssize_t settles_at;
    Py_ssize_t kinds_at;
    Py_ssize_t period_at;
#define PLACED(name) Py_ssize_t name##_at;
    FOR_EACH_PART(PLACED)
#undef PLACED
    Place are_there_in_blocks;
    Place busy_in_memory;
    /* NULL where _asgi.c could not be compiled. */
    const AsgiCalls *asgi;
    const MeterCalls *meter;
    PyObject *asgi_module;
    PyObject *meter_module;
    WayCalls calls;
} Names;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *rules;
    PyObject *plans;
    PyObject *forwarded_by;
    PyObject *places;
    PyObject *kinds_told;
    PyObject *blocks;
    PyObject *memory;
    PyObject *spaces;
    PyObject *time_ns;
    /* Of the kinds of identity that were asked for last: whether the app tells one, and whether keys are one. */
    PyObject *kinds;
    bool is_told;
    bool has_keys;
} ShortWay;

/* A request of ASGI's own, which has its scope; or what another arrival says of one, to be asked for its headers. */
typedef struct {
    const Request *request;
    PyObject *arrival;
} Asker;

static struct PyModuleDef MODULE;

static Names *
known_to(PyObject *self)
{
    return PyType_GetModuleState(Py_TYPE(self)); /* it has no class below it */
}

/* -- What the request meets ---------------------------------------------------------------------------------------- */

/* The plan of its route, if it is known: `Snapshot.route`. NULL, with or without an exception, if not. */
static PyObject *
plan_of(const Names *known, const ShortWay *self, const Request *request)
{
    PyObject *plan = NULL, *plans = NULL;
    if (!found(self->plans, request->method, &plans) || !PyDict_CheckExact(plans)) {
        Py_XDECREF(plans);
        return NULL;
    }
    PyObject *both = request->below == Py_None ? NULL : PyTuple_Pack(2, request->path, request->below);
    bool is_found = !PyErr_Occurred() && found(plans, both == NULL ? request->path : both, &plan);
    if (is_found && !Py_IS_TYPE(plan, known->plan_type)) {
        Py_CLEAR(plan);
    }
    Py_XDECREF(both);
    Py_DECREF(plans);
    return plan;
}

/* The lines of a header; NULL, with or without an exception, if they are not told in a list. */
static PyObject *
lines_of(const Names *known, Asker asker, PyObject *name)
{
    PyObject *lines = asker.arrival == NULL
                          ? known->asgi->lines(known->asgi->known, asker.request->native, name)
                          : PyObject_CallMethodOneArg(asker.arrival, known->header, name);
    if (lines != NULL && !PyList_CheckExact(lines)) {
        Py_CLEAR(lines);
    }
    return lines;
}

/* How many lines of that header there are, and what Python's own hash makes of the last: it makes the same of bytes and
 * of the text that they are in Latin-1. -1, without an exception, where it takes more than to look. */
static Py_ssize_t
count_at_once(const Names *known, PyObject *scope, PyObject *name, Py_hash_t *hash)
{
    Py_ssize_t length, number = 0;
    PyObject *headers = NULL;
    const char *wanted = PyUnicode_AsUTF8AndSize(name, &length);
    if (wanted != NULL && PyDict_CheckExact(scope)) {
        headers = PyDict_GetItemWithError(scope, known->headers);
    }
    if (headers == NULL || !PyList_CheckExact(headers)) {
        PyErr_Clear();
        return -1;
    }
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(headers); index++) {
        PyObject *pair = PyList_GET_ITEM(headers, index), *key, *value;
        if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2 ||
            !PyBytes_CheckExact(key = PyTuple_GET_ITEM(pair, 0)) ||
            !PyBytes_CheckExact(value = PyTuple_GET_ITEM(pair, 1))) {
            return -1;
        }
        if (PyBytes_GET_SIZE(key) == length && memcmp(PyBytes_AS_STRING(key), wanted, (size_t)length) == 0) {
            number++;
            *hash = PyObject_Hash(value);
        }
    }
    return number;
}

/* The same for any request; -1 with or without an exception. */
static Py_ssize_t
count_lines(const Names *known, Asker asker, PyObject *name, Py_hash_t *hash)
{
    Py_ssize_t number = asker.arrival == NULL ? count_at_once(known, asker.request->native, name, hash) : -1;
    if (number < 0) {
        PyObject *lines = lines_of(known, asker, name);
        number = lines == NULL ? -1 : PyList_GET_SIZE(lines);
        if (number == 1) {
            *hash = PyObject_Hash(PyList_GET_ITEM(lines, 0));
            number = *hash == -1 ? -1 : number;
        }
        Py_XDECREF(lines);
    }
    return number;
}

/* The header with an API key, and Python's hash of its line. False, with or without an exception, if several lines or
 * several headers may have one: then Python decides. */
static bool
find_key(const Names *known, const ShortWay *self, Asker asker, PyObject **name, PyObject **hash)
{
    *name = *hash = NULL;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->places); index++) {
        PyObject *place = PyTuple_GET_ITEM(self->places, index);
        Py_hash_t hashed = 0;
        Py_ssize_t number = count_lines(known, asker, place, &hashed);
        if (number == 1 && *name == NULL && (*hash = PyLong_FromSsize_t(hashed)) != NULL) {
            *name = Py_NewRef(place);
        } else if (number != 0) {
            Py_CLEAR(*name);
            Py_CLEAR(*hash);
            return false;
        }
    }
    if (*name == NULL) {
        *name = Py_NewRef(known->nothing);
        *hash = Py_NewRef(known->zero);
    }
    return true;
}

/* `Identities.sent`; NULL, with or without an exception, if that takes more than the common case. */
static PyObject *
sent(const Names *known, const ShortWay *self, Asker asker, PyObject *plan, PyObject *kinds)
{
    PyObject *all = NULL, *forwarded = Py_NewRef(known->no_lines), *name = NULL, *hash = NULL;
    if (self->forwarded_by != Py_None) {
        PyObject *lines = lines_of(known, asker, self->forwarded_by);
        Py_SETREF(forwarded, lines == NULL ? NULL : PyList_AsTuple(lines));
        Py_XDECREF(lines);
    }
    if (forwarded != NULL && !self->has_keys) {
        name = Py_NewRef(known->nothing);
        hash = Py_NewRef(known->zero);
    }
    if (forwarded != NULL && (!self->has_keys || find_key(known, self, asker, &name, &hash))) {
        all = PyTuple_Pack(SENT_FIELDS, plan, kinds, asker.request->peer, forwarded, name, hash);
        Py_DECREF(name);
        Py_DECREF(hash);
    }
    Py_XDECREF(forwarded);
    return all;
}

/* See which kinds of identity matter. False, with or without an exception, if the app is to be asked for one. */
static bool
look_at(const Names *known, ShortWay *self, PyObject *kinds)
{
    if (self->kinds == kinds) {
        return !self->is_told;
    }
    int is_told = 0, has_keys = PySet_Contains(kinds, known->api_key);
    for (Py_ssize_t index = 0; is_told == 0 && index < PyTuple_GET_SIZE(self->kinds_told); index++) {
        is_told = PySet_Contains(kinds, PyTuple_GET_ITEM(self->kinds_told, index));
    }
    if (is_told < 0 || has_keys < 0) {
        return false;
    }
    self->is_told = is_told;
    self->has_keys = has_keys;
    Py_XSETREF(self->kinds, Py_NewRef(kinds));
    return !is_told;
}

/* What clients of this kind have met before, in the period that the instant is in: `Rules.meet`. NULL, with or without
 * an exception, if nothing is known of them. */
static PyObject *
meeting_of(const Names *known, ShortWay *self, Asker asker, PyObject *plan, whole now_us)
{
    PyObject *kinds = slot(plan, known->kinds_at), *period = Py_XNewRef(slot(self->rules, known->period_at));
    PyObject *asked = NULL, *meeting = NULL;
    whole since_us, until_us;
    if (kinds != NULL && PyFrozenSet_CheckExact(kinds) && look_at(known, self, kinds) && period != NULL &&
        PyTuple_CheckExact(period) && PyTuple_GET_SIZE(period) == PERIOD_FIELDS &&
        read_whole(PyTuple_GET_ITEM(period, 0), &since_us) && read_whole(PyTuple_GET_ITEM(period, 1), &until_us) &&
        since_us <= now_us && now_us < until_us && PyDict_Check(PyTuple_GET_ITEM(period, 2))) {
        asked = sent(known, self, asker, plan, kinds);
    }
    if (asked != NULL && found(PyTuple_GET_ITEM(period, 2), asked, &meeting) &&
        (!PyTuple_CheckExact(meeting) || PyTuple_GET_SIZE(meeting) != MEETING_FIELDS)) {
        Py_CLEAR(meeting);
    }
    Py_XDECREF(asked);
    Py_XDECREF(period);
    return meeting;
}

/* The same at this instant, which is told as well. */
static PyObject *
meeting_now(const Names *known, ShortWay *self, Asker asker, PyObject *plan, PyObject **now_us)
{
    PyObject *now_ns = PyObject_CallNoArgs(self->time_ns), *meeting = NULL;
    int is_wide = 1;
    long long instant_ns = 0;
    if (now_ns != NULL && PyLong_CheckExact(now_ns)) {
        instant_ns = PyLong_AsLongLongAndOverflow(now_ns, &is_wide);
    }
    if (!is_wide && instant_ns >= 0) {
        meeting = meeting_of(known, self, asker, plan, instant_ns / 1000);
        *now_us = meeting == NULL ? NULL : PyLong_FromLongLong(instant_ns / 1000);
        if (*now_us == NULL) {
            Py_CLEAR(meeting);
        }
    }
    Py_XDECREF(now_ns);
    return meeting;
}

/* -- What it is told ----------------------------------------------------------------------------------------------- */

/* The store's answer: `MemoryStore.decide`. None where that takes more than the common case. */
static PyObject *
decided(Names *known, const ShortWay *self, PyObject *check, PyObject *now_us)
{
    if (!PyTuple_Check(check) || PyTuple_GET_SIZE(check) != CHECK_FIELDS) {
        Py_RETURN_NONE;
    }
    int is_busy = is_kept_true(&known->busy_in_memory, self->memory, known->_busy, "_busy");
    if (is_busy != 0) {
        return is_busy < 0 ? NULL : Py_NewRef(Py_None);
    }
    PyObject *keys = PyTuple_GET_ITEM(check, 0), *cost = PyTuple_GET_ITEM(check, 1), *id = PyTuple_GET_ITEM(check, 2);
    return PyTuple_Check(keys) ? known->meter->charge(known->meter->known, self->spaces, keys, cost, id, now_us)
                               : Py_NewRef(Py_None);
}

static void
fill(PyObject *object, Py_ssize_t offset, PyObject *value)
{
    *(PyObject **)((char *)object + offset) = Py_NewRef(value);
}

/* `admitted` in way.py, of who may pass. */
static PyObject *
admitted(const Names *known, PyObject *plan, PyObject *resolution, PyObject *decision, PyObject *description,
         PyObject *now_us)
{
    PyObject *admission = known->admission_type->tp_alloc(known->admission_type, 0);
    if (admission != NULL) {
        fill(admission, known->came_us_at, now_us);
        fill(admission, known->resolution_at, resolution);
        fill(admission, known->decision_at, decision);
        fill(admission, known->refusal_at, Py_None);
        fill(admission, known->is_over_at, slot(plan, known->settles_at) == Py_False ? Py_True : Py_False);
        fill(admission, known->shadows_at, known->no_lines);
        fill(admission, known->held_at, Py_None);
        fill(admission, known->_description_at, description);
        fill(admission, known->_committed_at, Py_None);
    }
    return admission;
}

/* `Rules.conclude`: in C for who may pass by the store's own word. */
static PyObject *
told(const Names *known, const ShortWay *self, PyObject *plan, PyObject *resolution, PyObject *decision,
     PyObject *description, PyObject *now_us)
{
    if (is_decision(decision, known->decision_type) && PyTuple_GET_ITEM(decision, SAID_ALLOWED) == Py_True &&
        PyTuple_GET_ITEM(decision, SAID_DEGRADED) == Py_None) {
        return admitted(known, plan, resolution, decision, description, now_us);
    }
    return PyObject_CallMethodObjArgs(self->rules, known->conclude, resolution, decision, description, now_us, NULL);
}

static PyObject *
concluded(Names *known, const ShortWay *self, PyObject *plan, PyObject *meeting, PyObject *now_us)
{
    PyObject *decision = decided(known, self, PyTuple_GET_ITEM(meeting, 1), now_us);
    if (decision == NULL || decision == Py_None) {
        return decision;
    }
    PyObject *resolution = PyTuple_GET_ITEM(meeting, 0), *description = PyTuple_GET_ITEM(meeting, 2);
    PyObject *admission = told(known, self, plan, resolution, decision, description, now_us);
    Py_DECREF(decision);
    return admission;
}

/* None, or NULL with an exception. */
static PyObject *
unusual(void)
{
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *
admit(Names *known, ShortWay *self, Asker asker)
{
    PyObject *plan = plan_of(known, self, asker.request);
    if (plan == NULL) {
        return unusual();
    }
    if (slot(plan, known->is_exempt_at) == Py_True) {
        Py_DECREF(plan);
        return Py_NewRef(known->free);
    }
    PyObject *shadows = slot(plan, known->watches_at), *admission = NULL, *now_us = NULL, *meeting = NULL;
    if (self->memory != Py_None && slot(plan, known->leases_at) == Py_False && shadows != NULL &&
        PyTuple_CheckExact(shadows) && PyTuple_GET_SIZE(shadows) == 0) {
        meeting = meeting_now(known, self, asker, plan, &now_us);
    }
    if (meeting != NULL) {
        admission = concluded(known, self, plan, meeting, now_us);
        Py_DECREF(meeting);
        Py_DECREF(now_us);
    }
    Py_DECREF(plan);
    return admission == NULL ? unusual() : admission;
}

static PyObject *
recognize(Names *known, ShortWay *self, Asker asker)
{
    PyObject *plan = plan_of(known, self, asker.request), *meeting = NULL, *now_us = NULL, *all = NULL;
    if (plan != NULL && slot(plan, known->is_exempt_at) == Py_False) {
        meeting = meeting_now(known, self, asker, plan, &now_us);
    }
    if (meeting != NULL) {
        all = PyTuple_Pack(2 + MEETING_FIELDS, plan, PyTuple_GET_ITEM(meeting, 0), PyTuple_GET_ITEM(meeting, 1),
                           PyTuple_GET_ITEM(meeting, 2), now_us);
        Py_DECREF(meeting);
        Py_DECREF(now_us);
    }
    Py_XDECREF(plan);
    return all == NULL ? unusual() : all;
}

/* -- Who asks ------------------------------------------------------------------------------------------------------ */

typedef PyObject *(*Question)(Names *known, ShortWay *self, Asker asker);

/* What an arrival says of its request; its scope only if it is of ASGI's own kind. False with an exception. */
static bool
read_arrival(const Names *known, PyObject *arrival, Request *request)
{
    if (known->asgi != NULL && Py_IS_TYPE(arrival, known->asgi->arrival_type)) {
        request->native = Py_XNewRef(((const Arrival *)arrival)->request.native);
    }
    request->method = PyObject_GetAttr(arrival, known->method);
    request->path = request->method == NULL ? NULL : PyObject_GetAttr(arrival, known->path);
    request->below = request->path == NULL ? NULL : PyObject_GetAttr(arrival, known->below);
    request->peer = request->below == NULL ? NULL : PyObject_GetAttr(arrival, known->peer);
    return request->peer != NULL;
}

/* 1 or 0, or -1 with an exception. */
static int
is_anybody_blocked(Names *known, const ShortWay *self)
{
    return is_kept_true(&known->are_there_in_blocks, self->blocks, known->are_there, "are_there");
}

/* Ask it for a request, unless somebody is blocked: then there is more to look at. */
static PyObject *
ask_for(Names *known, PyObject *way, const Request *request, Question question)
{
    ShortWay *self = (ShortWay *)way;
    return is_anybody_blocked(known, self) == 0 ? question(known, self, (Asker){request, NULL}) : unusual();
}

/* The same for any arrival. */
static PyObject *
ask_for_arrival(PyObject *way, PyObject *arrival, Question question)
{
    Names *known = known_to(way);
    ShortWay *self = (ShortWay *)way;
    if (is_anybody_blocked(known, self) != 0) {
        return unusual();
    }
    Request request = {0};
    PyObject *answer = NULL;
    if (read_arrival(known, arrival, &request)) {
        answer = question(known, self, (Asker){&request, request.native == NULL ? arrival : NULL});
    }
    let_go_of(&request);
    return answer;
}

static PyObject *
way_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    if (PyVectorcall_NARGS(flags) != 1 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "short_way(arrival)");
        return NULL;
    }
    return ask_for_arrival(object, args[0], admit);
}

PyDoc_STRVAR(recognize_doc, "recognize($self, arrival, /)\n--\n\n"
                            "What a request meets that is like one before: its route's plan, the resolution, what\n"
                            "the store is asked, how the client is told, and the instant. None if it is like none.");

static PyObject *
way_recognize(PyObject *object, PyObject *arrival)
{
    return ask_for_arrival(object, arrival, recognize);
}

/* By what `recognize` has said. */
static PyObject *
conclude(void *module_state, PyObject *way, PyObject *all, PyObject *decision)
{
    return told(module_state, (const ShortWay *)way, PyTuple_GET_ITEM(all, 0), PyTuple_GET_ITEM(all, 1), decision,
                PyTuple_GET_ITEM(all, 3), PyTuple_GET_ITEM(all, 4));
}

PyDoc_STRVAR(conclude_doc, "conclude($self, known, decision, /)\n--\n\n"
                           "How a request is let in, or its refusal, by what `recognize` has said of it and what the\n"
                           "store has.");

static PyObject *
way_conclude(PyObject *object, PyObject *const *args, Py_ssize_t number)
{
    Names *known = known_to(object);
    PyObject *all = number == 2 ? args[0] : NULL;
    if (all == NULL || !PyTuple_CheckExact(all) || PyTuple_GET_SIZE(all) != 2 + MEETING_FIELDS ||
        !Py_IS_TYPE(PyTuple_GET_ITEM(all, 0), known->plan_type)) {
        PyErr_SetString(PyExc_TypeError, "conclude(known: tuple, as recognize gives it, decision)");
        return NULL;
    }
    return conclude(known, object, all, args[1]);
}

static PyObject *
admit_request(void *known, PyObject *way, const Request *request)
{
    return ask_for(known, way, request, admit);
}

static PyObject *
recognize_request(void *known, PyObject *way, const Request *request)
{
    return ask_for(known, way, request, recognize);
}

/* -- ShortWay ------------------------------------------------------------------------------------------------------ */

static PyObject *
way_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rules",  "plans",  "forwarded_by", "places", "kinds_told",
                            "blocks", "memory", "spaces",       "time_ns", NULL};
    const Names *known = PyModule_GetState(PyType_GetModuleByDef(type, &MODULE));
    PyObject *rules, *plans, *forwarded_by, *places, *kinds_told, *blocks, *memory, *spaces, *time_ns;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OO!O!OOO!O", names, known->rules_type, &rules, &PyDict_Type,
                                     &plans, &forwarded_by, &PyTuple_Type, &places, &PyTuple_Type, &kinds_told, &blocks,
                                     &memory, &PyDict_Type, &spaces, &time_ns)) {
        return NULL;
    }
    ShortWay *self = (ShortWay *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->call = way_call;
        self->rules = Py_NewRef(rules);
        self->plans = Py_NewRef(plans);
        self->forwarded_by = Py_NewRef(forwarded_by);
        self->places = Py_NewRef(places);
        self->kinds_told = Py_NewRef(kinds_told);
        self->blocks = Py_NewRef(blocks);
        self->memory = Py_NewRef(memory);
        self->spaces = Py_NewRef(spaces);
        self->time_ns = Py_NewRef(time_ns);
    }
    return (PyObject *)self;
}

static int
way_traverse(PyObject *object, visitproc visit, void *arg)
{
    ShortWay *self = (ShortWay *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->rules);
    Py_VISIT(self->plans);
    Py_VISIT(self->forwarded_by);
    Py_VISIT(self->places);
    Py_VISIT(self->kinds_told);
    Py_VISIT(self->blocks);
    Py_VISIT(self->memory);
    Py_VISIT(self->spaces);
    Py_VISIT(self->time_ns);
    Py_VISIT(self->kinds);
    return 0;
}

static int
way_clear(PyObject *object)
{
    ShortWay *self = (ShortWay *)object;
    Py_CLEAR(self->rules);
    Py_CLEAR(self->plans);
    Py_CLEAR(self->forwarded_by);
    Py_CLEAR(self->places);
    Py_CLEAR(self->kinds_told);
    Py_CLEAR(self->blocks);
    Py_CLEAR(self->memory);
    Py_CLEAR(self->spaces);
    Py_CLEAR(self->time_ns);
    Py_CLEAR(self->kinds);
    return 0;
}

static void
way_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    way_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef WAY_MEMBERS[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ShortWay, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef WAY_METHODS[] = {
    {"recognize", way_recognize, METH_O, recognize_doc},
    {"conclude", (PyCFunction)(void (*)(void))way_conclude, METH_FASTCALL, conclude_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot WAY_SLOTS[] = {
    {Py_tp_new, way_new},
    {Py_tp_methods, WAY_METHODS},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_traverse, way_traverse},
    {Py_tp_clear, way_clear},
    {Py_tp_dealloc, way_dealloc},
    {Py_tp_members, WAY_MEMBERS},
    {Py_tp_doc, "How a request is let in, or None where that takes more than the common case."},
    {0, NULL},
};

static PyType_Spec WAY = {
    .name = "headgate.adapters._short_way.ShortWay",
    .basicsize = sizeof(ShortWay),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = WAY_SLOTS,
};

/* -- The module ---------------------------------------------------------------------------------------------------- */

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
    known->nothing = PyUnicode_FromString("");
    known->no_lines = PyTuple_New(0);
    known->zero = PyLong_FromLong(0);
    known->meter = calls_of("headgate.stores._meter", METER_CALLS, &known->meter_module);
    known->free = known->meter == NULL ? NULL : taken_from("headgate.adapters.way", "FREE");
    known->admission_type = known->free == NULL ? NULL : (PyTypeObject *)Py_NewRef(Py_TYPE(known->free));
    known->rules_type = (PyTypeObject *)(known->free == NULL ? NULL : taken_from("headgate.adapters.way", "Rules"));
    known->plan_type =
        (PyTypeObject *)(known->rules_type == NULL ? NULL : taken_from("headgate.policy.snapshot", "RoutePlan"));
    known->decision_type = known->plan_type == NULL ? NULL : decision_class();
    if (known->decision_type == NULL || known->nothing == NULL || known->no_lines == NULL || known->zero == NULL ||
        !find_slot(known->plan_type, "is_exempt", &known->is_exempt_at) ||
        !find_slot(known->plan_type, "leases", &known->leases_at) ||
        !find_slot(known->plan_type, "shadows", &known->watches_at) ||
        !find_slot(known->plan_type, "settles", &known->settles_at) ||
        !find_slot(known->plan_type, "kinds", &known->kinds_at) ||
        !find_slot(known->rules_type, "_period", &known->period_at)) {
        return -1;
    }
#define FOUND(name)                                                                                                    \
    if (!find_slot(known->admission_type, #name, &known->name##_at)) {                                                 \
        return -1;                                                                                                     \
    }
    FOR_EACH_PART(FOUND)
#undef FOUND
    known->asgi = calls_of("headgate.adapters._asgi", ASGI_CALLS, &known->asgi_module);
    PyErr_Clear();
    known->way_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &WAY, NULL);
    known->calls = (WayCalls){known, known->way_type, admit_request, recognize_request, conclude};
    return known->way_type == NULL || PyModule_AddType(module, known->way_type) < 0
               ? -1
               : add_calls(module, &known->calls, WAY_CALLS);
}

static int
visit(PyObject *module, visitproc visit, void *arg)
{
    Names *known = PyModule_GetState(module);
    Py_VISIT(known->way_type);
    Py_VISIT(known->plan_type);
    Py_VISIT(known->rules_type);
    Py_VISIT(known->admission_type);
    Py_VISIT(known->decision_type);
    Py_VISIT(known->free);
    Py_VISIT(known->asgi_module);
    Py_VISIT(known->meter_module);
    Py_VISIT(known->are_there_in_blocks.type);
    Py_VISIT(known->busy_in_memory.type);
    return 0;
}

static int
clear(PyObject *module)
{
    Names *known = PyModule_GetState(module);
    Py_CLEAR(known->way_type);
    Py_CLEAR(known->plan_type);
    Py_CLEAR(known->rules_type);
    Py_CLEAR(known->admission_type);
    Py_CLEAR(known->decision_type);
    Py_CLEAR(known->free);
    Py_CLEAR(known->asgi_module);
    Py_CLEAR(known->meter_module);
    Py_CLEAR(known->are_there_in_blocks.type);
    Py_CLEAR(known->busy_in_memory.type);
    Py_CLEAR(known->nothing);
    Py_CLEAR(known->no_lines);
    Py_CLEAR(known->zero);
#define CLEARED(name) Py_CLEAR(known->name);
    FOR_EACH_NAME(CLEARED)
#undef CLEARED
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
    .m_name = "headgate.adapters._short_way",
    .m_doc = "The short way of a request through the gate, compiled.",
    .m_size = sizeof(Names),
    .m_slots = MODULE_SLOTS,
    .m_traverse = visit,
    .m_clear = clear,
    .m_free = end,
};

PyMODINIT_FUNC
PyInit__short_way(void)
{
    return PyModuleDef_Init(&MODULE);
}
