"""Learning the policy: corpora, routing logs, training, registry."""
