/* Mirrors sliding_window.py, for a client that is there. */

static bool
sliding_window_is_ahead(const whole *state, whole now_us, const Numbers *limit)
{
    return state[0] - now_us > limit->period_us;
}

static Verdict
sliding_window(whole *state, whole now_us, whole cost, const Numbers *limit)
{
    const whole quota = limit->quota, period_us = limit->period_us;
    whole ts_us = state[0], te_us = larger(now_us, ts_us);
    whole window = floor_div(te_us, period_us), age = window - floor_div(ts_us, period_us);
    whole current = age == 0 ? state[1] : 0;
    whole previous = age == 0 ? state[2] : age == 1 ? state[1] : 0;
    whole start_us = window * period_us, retry_us = 0;
    whole share = ceil_div(previous * (period_us - (te_us - start_us)), period_us);
    if (current + share + cost <= quota || !cost) {
        if (cost) {
            current += cost;
            state[0] = te_us;
            state[1] = current;
            state[2] = previous;
        }
    }
    else if (cost > quota) {
        retry_us = NEVER;
    }
    else if (current + cost <= quota) {
        retry_us = start_us + period_us - floor_div((quota - current - cost) * period_us, previous) - now_us;
    }
    else {
        retry_us = start_us + 2 * period_us - floor_div((quota - cost) * period_us, current) - now_us;
    }
    whole weighs_for = current ? 2 : previous ? 1 : 0;
    whole reset_us = weighs_for ? start_us + weighs_for * period_us - now_us : 0;
    return (Verdict){larger(quota - current - share, 0), retry_us, reset_us, 0};
}
