"""Tuning: Plans tried on real arguments, Trials kept, the best by problem in a PlanTable."""
