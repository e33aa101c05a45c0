/* What the modules in C have in common: whole numbers of C and of Python, one made of the other, and how to look up. */
#ifndef HEADGATE_PYTHON_H
#define HEADGATE_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <structmember.h>

#include "algorithms/_exact.h"

enum { WHOLE_BYTES = sizeof(whole) };

/* Numbers of more than 64 bits. Python 3.11 shows its digits, and to take them takes a tenth of the time of its own
 * functions, and less for smaller numbers, too. `read_wide` is false, without an exception, for what does not fit. */
#if PY_VERSION_HEX >= 0x030D0000

static inline bool
read_wide(PyObject *number, whole *read)
{
    return PyLong_AsNativeBytes(number, read, WHOLE_BYTES, -1) <= WHOLE_BYTES;
}

static inline PyObject *
made_wide(whole number)
{
    return PyLong_FromNativeBytes(&number, WHOLE_BYTES, -1);
}

#elif PY_VERSION_HEX >= 0x030C0000

static inline bool
read_wide(PyObject *number, whole *read)
{
    int is_unread =
        _PyLong_AsByteArray((PyLongObject *)number, (unsigned char *)read, WHOLE_BYTES, PY_LITTLE_ENDIAN, 1);
    PyErr_Clear();
    return !is_unread;
}

static inline PyObject *
made_wide(whole number)
{
    return _PyLong_FromByteArray((unsigned char *)&number, WHOLE_BYTES, PY_LITTLE_ENDIAN, 1);
}

#else

static inline bool
read_wide(PyObject *number, whole *read)
{
    Py_ssize_t count = Py_ABS(Py_SIZE(number));
    const digit *digits = ((PyLongObject *)number)->ob_digit;
    if (count * PyLong_SHIFT >= 8 * WHOLE_BYTES) {
        return false;
    }
    whole size = 0;
    while (count-- > 0) {
        size = (size << PyLong_SHIFT) | digits[count];
    }
    *read = Py_SIZE(number) < 0 ? -size : size;
    return true;
}

static inline PyObject *
made_wide(whole number)
{
    unsigned __int128 rest = number < 0 ? -(unsigned __int128)number : (unsigned __int128)number;
    digit digits[8 * WHOLE_BYTES / PyLong_SHIFT + 1];
    Py_ssize_t count = 0;
    for (; rest != 0; rest >>= PyLong_SHIFT) {
        digits[count++] = (digit)(rest & PyLong_MASK);
    }
    PyLongObject *made = _PyLong_New(count);
    if (made != NULL) {
        memcpy(made->ob_digit, digits, (size_t)count * sizeof(digit));
        Py_SET_SIZE(made, number < 0 ? -count : count);
    }
    return (PyObject *)made;
}

#endif

/* False, without an exception, if it is no int, or does not fit. */
static inline bool
read_whole(PyObject *number, whole *read)
{
    if (!PyLong_CheckExact(number)) {
        return false;
    }
#if PY_VERSION_HEX >= 0x030C0000
    int is_wide;
    long long narrow = PyLong_AsLongLongAndOverflow(number, &is_wide);
    *read = narrow;
    if (!is_wide) {
        return true;
    }
#endif
    return read_wide(number, read);
}

static inline PyObject *
made_whole(whole number)
{
    return (long long)number == number ? PyLong_FromLongLong((long long)number) : made_wide(number);
}

/* A new reference to what a module of Python's has under that name; NULL, with an exception, if it has nothing. */
static inline PyObject *
taken_from(const char *module, const char *name)
{
    PyObject *taken = PyImport_ImportModule(module);
    if (taken != NULL) {
        Py_SETREF(taken, PyObject_GetAttrString(taken, name));
    }
    return taken;
}

/* A new reference to what a dict has under that name: others may take it out of there while it is used. False where it
 * has nothing, or an exception was raised. */
static inline bool
found(PyObject *dict, PyObject *name, PyObject **value)
{
#if PY_VERSION_HEX >= 0x030D0000
    return PyDict_GetItemRef(dict, name, value) > 0;
#else
    *value = Py_XNewRef(PyDict_GetItemWithError(dict, name));
    return *value != NULL;
#endif
}

/* A new reference to what a mapping, which is a dict if it is ASGI's, has under that name; NULL with an exception. */
static inline PyObject *
item_of(PyObject *mapping, PyObject *name)
{
    PyObject *value = NULL;
    if (PyDict_CheckExact(mapping) && (found(mapping, name, &value) || PyErr_Occurred())) {
        return value;
    }
    return PyObject_GetItem(mapping, name);
}

/* Whether it is that text, which is ASCII. */
static inline bool
is_text(PyObject *text, const char *wanted, size_t length)
{
    if (PyUnicode_CheckExact(text) && PyUnicode_IS_COMPACT_ASCII(text)) {
        return (size_t)PyUnicode_GET_LENGTH(text) == length && memcmp(PyUnicode_1BYTE_DATA(text), wanted, length) == 0;
    }
    return PyUnicode_Check(text) && PyUnicode_CompareWithASCIIString(text, wanted) == 0;
}

#define IS_TEXT(text, wanted) is_text(text, wanted, sizeof(wanted) - 1)

/* The calls of another module in C, which is kept, as they are in its state; NULL, with an exception, where it was not
 * built. */
static inline const void *
calls_of(const char *name, const char *capsule, PyObject **module)
{
    *module = PyImport_ImportModule(name);
    PyObject *calls = *module == NULL ? NULL : PyObject_GetAttrString(*module, "calls");
    const void *found = calls == NULL ? NULL : PyCapsule_GetPointer(calls, capsule);
    Py_XDECREF(calls);
    return found;
}

/* Hand them over. */
static inline int
add_calls(PyObject *module, void *calls, const char *capsule)
{
    PyObject *handed_over = PyCapsule_New(calls, capsule, NULL);
    int is_added = handed_over == NULL ? -1 : PyModule_AddObjectRef(module, "calls", handed_over);
    Py_XDECREF(handed_over);
    return is_added;
}

/* Whether what an object has under that name is true: 1 or 0, or -1 with an exception. */
static inline int
is_true(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int is = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return is;
}

/* Where objects of a class with slots keep what has this name. False, with an exception, if they have no such slot. */
static inline bool
find_slot(PyTypeObject *type, const char *name, Py_ssize_t *offset)
{
    PyObject *descriptor = PyObject_GetAttrString((PyObject *)type, name);
    bool is_slot = descriptor != NULL && Py_IS_TYPE(descriptor, &PyMemberDescr_Type);
    if (is_slot) {
        /* One of another class, or of another type than an object, says nothing about what is at its offset here. */
        int kind = ((PyMemberDescrObject *)descriptor)->d_member->type;
        is_slot = PyType_IsSubtype(type, PyDescr_TYPE(descriptor)) && (kind == T_OBJECT_EX || kind == T_OBJECT);
    }
    if (is_slot) {
        *offset = ((PyMemberDescrObject *)descriptor)->d_member->offset;
    }
    else if (descriptor != NULL) {
        PyErr_Format(PyExc_TypeError, "%s has no slot %s", type->tp_name, name);
    }
    Py_XDECREF(descriptor);
    return is_slot;
}

/* Borrowed; NULL for a slot that was never filled. */
static inline PyObject *
slot(PyObject *object, Py_ssize_t offset)
{
    return *(PyObject **)((char *)object + offset);
}

/* Where objects of the class that was seen last keep something. */
typedef struct {
    PyTypeObject *type;
    Py_ssize_t offset;
} Place;

/* The slot of that name. NULL, without an exception, if it has no such slot. */
static inline PyObject **
slot_in(Place *place, PyObject *object, const char *name)
{
    if (!Py_IS_TYPE(object, place->type)) {
        Py_ssize_t offset;
        if (!find_slot(Py_TYPE(object), name, &offset)) {
            PyErr_Clear();
            return NULL;
        }
        Py_XSETREF(place->type, (PyTypeObject *)Py_NewRef(Py_TYPE(object)));
        place->offset = offset;
    }
    return (PyObject **)((char *)object + place->offset);
}

/* What an object has in it; borrowed. NULL, without an exception, if that is nothing. */
static inline PyObject *
kept_in(Place *place, PyObject *object, const char *name)
{
    PyObject **kept = slot_in(place, object, name);
    return kept == NULL ? NULL : *kept;
}

/* The same of something that is true or not, by its slot or by its name: 1 or 0, or -1 with an exception. */
static inline int
is_kept_true(Place *place, PyObject *object, PyObject *name, const char *spelled)
{
    PyObject *value = kept_in(place, object, spelled);
    return value == Py_False ? 0 : value == Py_True ? 1 : is_true(object, name);
}

/* Raise what was thrown, as `raise` would. */
static inline void
raise(PyObject *const *args, Py_ssize_t number)
{
    if (PyExceptionInstance_Check(args[0])) {
        PyErr_SetObject((PyObject *)Py_TYPE(args[0]), args[0]);
    }
    else if (PyExceptionClass_Check(args[0])) {
        PyErr_SetObject(args[0], number > 1 && args[1] != Py_None ? args[1] : NULL);
    }
    else {
        PyErr_SetString(PyExc_TypeError, "exceptions must be classes or instances deriving from BaseException");
    }
}

/* Slots of a module that keeps what it knows to itself, and changes nothing that others see without Python's own lock:
 * each interpreter may have one, also those without that lock. */
#if PY_VERSION_HEX >= 0x030D0000
#define KEEPS_TO_ITSELF \
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED}, {Py_mod_gil, Py_MOD_GIL_NOT_USED}
#elif PY_VERSION_HEX >= 0x030C0000
#define KEEPS_TO_ITSELF {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED}
#else
#define KEEPS_TO_ITSELF {0, NULL}
#endif

#endif
