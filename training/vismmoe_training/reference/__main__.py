"""`python -m vismmoe_training.reference`: train the reference model."""

from vismmoe_training.reference.recipe import main

main()
