"""headgate beside its peers in one interleaved run: `make bench`, or `python -m bench --help`."""
