/* 128-bit arithmetic for the algorithms in C, with the results that Python's integers give.
 *
 * A limit's numbers are below 2**53 (see `Limit`), and instants and costs below 2**63, so products of two fit. The
 * callers leave requests with larger numbers to Python. */
#ifndef HEADGATE_EXACT_H
#define HEADGATE_EXACT_H

#ifndef __SIZEOF_INT128__
#error "this compiler has no 128-bit integers (__int128); use gcc or clang on a 64-bit platform"
#endif

__extension__ typedef __int128 int128;

enum { NEVER = -1 };

/* Each algorithm NAME has NAME_is_ahead: true if a state is more than a period in the future because the clock was set
 * back. Only the Python version migrates such states. */

/* The same as LimitNumbers in _interface.py. */
typedef struct {
    int128 quota, period_us, tokens, ticks, full;
} LimitNumbers;

typedef struct {
    int128 remaining, retry_us, reset_us, delay_us;
} Verdict;

/* Rounds down, as Python does; `by` is positive. */
static inline int128 floor_div(int128 number, int128 by) {
    int128 quotient = number / by;
    return quotient - (quotient * by > number);
}

static inline int128 ceil_div(int128 number, int128 by) {
    return -floor_div(-number, by);
}

static inline int128 larger(int128 one, int128 other) {
    return one > other ? one : other;
}

static inline int128 smaller(int128 one, int128 other) {
    return one < other ? one : other;
}

#endif
