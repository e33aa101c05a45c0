"""A small shop's API with a policy, started by `make run`. You would write only app.py and policy.yaml."""
