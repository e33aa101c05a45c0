/* The same as sliding_window.py, for an existing counter. */

static bool sliding_window_is_ahead(const int128 *state, int128 now_us, const LimitNumbers *limit) {
    return state[0] - now_us > limit->period_us;
}

static Verdict sliding_window(int128 *state, int128 now_us, int128 cost, const LimitNumbers *limit) {
    const int128 quota = limit->quota, period_us = limit->period_us;
    int128 ts_us = state[0], te_us = larger(now_us, ts_us);
    int128 window = floor_div(te_us, period_us), age = window - floor_div(ts_us, period_us);
    int128 current = age == 0 ? state[1] : 0;
    int128 previous = age == 0 ? state[2] : age == 1 ? state[1] : 0;
    int128 start_us = window * period_us, retry_us = 0;
    int128 share = ceil_div(previous * (period_us - (te_us - start_us)), period_us);
    if (current + share + cost <= quota || !cost) {
        if (cost) {
            current += cost;
            state[0] = te_us;
            state[1] = current;
            state[2] = previous;
        }
    } else if (cost > quota) {
        retry_us = NEVER;
    } else if (current + cost <= quota) {
        retry_us = start_us + period_us - floor_div((quota - current - cost) * period_us, previous) - now_us;
    } else {
        retry_us = start_us + 2 * period_us - floor_div((quota - cost) * period_us, current) - now_us;
    }
    int128 weighs_for = current ? 2 : previous ? 1 : 0;
    int128 reset_us = weighs_for ? start_us + weighs_for * period_us - now_us : 0;
    return (Verdict){larger(quota - current - share, 0), retry_us, reset_us, 0};
}
