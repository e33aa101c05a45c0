"""A small shop's API behind a policy: `make run` starts it. `app.py` and `policy.yaml` are what you would write."""
