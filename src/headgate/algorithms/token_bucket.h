/* Mirrors token_bucket.py, for a bucket that is there. */

#define LEVEL_BITS 53

static bool
token_bucket_is_ahead(const whole *state, whole now_us, const Numbers *limit)
{
    return ((*state >> LEVEL_BITS) - now_us) * limit->tokens > limit->full;
}

static Verdict
token_bucket(whole *state, whole now_us, whole cost, const Numbers *limit)
{
    const whole level_mask = ((whole)1 << LEVEL_BITS) - 1;
    whole te_us = *state >> LEVEL_BITS, level = *state & level_mask;
    whole ahead_us = te_us - now_us;
    if (ahead_us < 0) {
        level = smaller(level - ahead_us * limit->tokens, limit->full);
        te_us = now_us;
        ahead_us = 0;
    }
    whole need = cost * limit->ticks, retry_us = 0;
    if (need <= level) {
        if (cost) {
            level -= need;
            *state = te_us * (level_mask + 1) + level;
        }
    }
    else if (need > limit->full) {
        retry_us = NEVER;
    }
    else {
        retry_us = ahead_us + ceil_div(need - level, limit->tokens);
    }
    whole reset_us = level < limit->full ? ahead_us + ceil_div(limit->full - level, limit->tokens) : 0;
    return (Verdict){level / limit->ticks, retry_us, reset_us, 0};
}
