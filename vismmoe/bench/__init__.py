"""Side-by-side measurements: several ways to run one checkpoint under one memory cap, each in a process of its own."""
