"""`make paper`: each table of the VisMMoE paper beside ours, from real runs on the reference model, three seeds."""
