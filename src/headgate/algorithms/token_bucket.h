/* The same as token_bucket.py, for an existing bucket. */

#define LEVEL_BITS 53

static bool token_bucket_is_ahead(const int128 *state, int128 now_us, const LimitNumbers *limit) {
    return ((*state >> LEVEL_BITS) - now_us) * limit->tokens > limit->full;
}

static Verdict token_bucket(int128 *state, int128 now_us, int128 cost, const LimitNumbers *limit) {
    const int128 level_mask = ((int128)1 << LEVEL_BITS) - 1;
    int128 te_us = *state >> LEVEL_BITS, level = *state & level_mask;
    int128 ahead_us = te_us - now_us;
    if (ahead_us < 0) {
        level = smaller(level - ahead_us * limit->tokens, limit->full);
        te_us = now_us;
        ahead_us = 0;
    }
    int128 need = cost * limit->ticks, retry_us = 0;
    if (need <= level) {
        if (cost) {
            level -= need;
            *state = te_us * (level_mask + 1) + level;
        }
    } else if (need > limit->full) {
        retry_us = NEVER;
    } else {
        retry_us = ahead_us + ceil_div(need - level, limit->tokens);
    }
    int128 reset_us = level < limit->full ? ahead_us + ceil_div(limit->full - level, limit->tokens) : 0;
    return (Verdict){level / limit->ticks, retry_us, reset_us, 0};
}
