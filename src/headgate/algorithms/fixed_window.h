/* The same as fixed_window.py, for an existing counter. */

static bool fixed_window_is_ahead(const int128 *state, int128 now_us, const LimitNumbers *limit) {
    return state[0] - now_us > limit->period_us;
}

static Verdict fixed_window(int128 *state, int128 now_us, int128 cost, const LimitNumbers *limit) {
    int128 ts_us = state[0], te_us = larger(now_us, ts_us);
    int128 window = floor_div(te_us, limit->period_us);
    int128 used = window == floor_div(ts_us, limit->period_us) ? state[1] : 0;
    int128 to_next_us = (window + 1) * limit->period_us - now_us, retry_us = 0;
    if (used + cost <= limit->quota || !cost) {
        if (cost) {
            used += cost;
            state[0] = te_us;
            state[1] = used;
        }
    } else {
        retry_us = cost > limit->quota ? NEVER : to_next_us;
    }
    return (Verdict){larger(limit->quota - used, 0), retry_us, used ? to_next_us : 0, 0};
}
