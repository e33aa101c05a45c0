/* Whole numbers for the formulas in C, exact as Python's: they are 128 bits wide, and nothing that a limit lets in
 * needs more. Numbers below are under 2**53 (see `Limit`), instants and costs under 2**63, so that a product of two
 * always fits. Who has a number that does not fit leaves the whole request to Python. */
#ifndef HEADGATE_EXACT_H
#define HEADGATE_EXACT_H

#ifndef __SIZEOF_INT128__
#error "this compiler has no whole numbers of 128 bits: headgate runs as plain Python instead"
#endif

__extension__ typedef __int128 whole;

enum { NEVER = -1 };

/* Each formula NAME comes with NAME_is_ahead: whether a state lies more than a period in the future, because the clock
 * was set back. Python re-dates it then; a formula in C is never applied to it. */

/* The numbers of a limit, as in LimitNumbers. */
typedef struct {
    whole quota, period_us, tokens, ticks, full;
} Numbers;

typedef struct {
    whole remaining, retry_us, reset_us, delay_us;
} Verdict;

/* Rounded down, as Python does; `by` is more than 0. */
static inline whole
floor_div(whole number, whole by)
{
    whole quotient = number / by;
    return quotient - (quotient * by > number);
}

static inline whole
ceil_div(whole number, whole by)
{
    return -floor_div(-number, by);
}

static inline whole
larger(whole one, whole other)
{
    return one > other ? one : other;
}

static inline whole
smaller(whole one, whole other)
{
    return one < other ? one : other;
}

#endif
