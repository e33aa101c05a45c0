/* The same as gcra.py, for an existing counter. */

static bool gcra_is_ahead(const int128 *state, int128 now_us, const LimitNumbers *limit) {
    return *state - now_us * limit->tokens > 2 * limit->full;
}

static Verdict gcra(int128 *state, int128 now_us, int128 cost, const LimitNumbers *limit) {
    int128 now = now_us * limit->tokens;
    int128 debt = larger(*state - now, 0);
    int128 need = cost * limit->ticks, retry_us = 0;
    if (debt + need <= limit->full || !cost) {
        if (cost) {
            debt += need;
            *state = now + debt;
        }
    } else if (need > limit->full) {
        retry_us = NEVER;
    } else {
        retry_us = ceil_div(debt + need - limit->full, limit->tokens);
    }
    int128 remaining = larger(limit->full - debt, 0) / limit->ticks;
    return (Verdict){remaining, retry_us, ceil_div(debt, limit->tokens), 0};
}
