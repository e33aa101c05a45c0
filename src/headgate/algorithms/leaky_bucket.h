/* The same as leaky_bucket.py, for an existing queue. */

static Verdict leaky_bucket(int128 *state, int128 now_us, int128 cost, const LimitNumbers *limit) {
    int128 waiting = larger(*state - now_us * limit->tokens, 0);
    Verdict verdict = gcra(state, now_us, cost, limit);
    if (!verdict.retry_us) verdict.delay_us = ceil_div(waiting, limit->tokens);
    return verdict;
}
