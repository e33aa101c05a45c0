/* Mirrors leaky_bucket.py, for a queue that is there. */

static Verdict
leaky_bucket(whole *state, whole now_us, whole cost, const Numbers *limit)
{
    whole waiting = larger(*state - now_us * limit->tokens, 0);
    Verdict verdict = gcra(state, now_us, cost, limit);
    if (!verdict.retry_us) {
        verdict.delay_us = ceil_div(waiting, limit->tokens);
    }
    return verdict;
}
