/* Mirrors gcra.py, for a client that is there. */

static bool
gcra_is_ahead(const whole *state, whole now_us, const Numbers *limit)
{
    return *state - now_us * limit->tokens > 2 * limit->full;
}

static Verdict
gcra(whole *state, whole now_us, whole cost, const Numbers *limit)
{
    whole now = now_us * limit->tokens;
    whole debt = larger(*state - now, 0);
    whole need = cost * limit->ticks, retry_us = 0;
    if (debt + need <= limit->full || !cost) {
        if (cost) {
            debt += need;
            *state = now + debt;
        }
    }
    else if (need > limit->full) {
        retry_us = NEVER;
    }
    else {
        retry_us = ceil_div(debt + need - limit->full, limit->tokens);
    }
    whole remaining = larger(limit->full - debt, 0) / limit->ticks;
    return (Verdict){remaining, retry_us, ceil_div(debt, limit->tokens), 0};
}
