"""`vismmoe report`: pictures of routing, foresight and transfers on one page that needs nothing else."""
