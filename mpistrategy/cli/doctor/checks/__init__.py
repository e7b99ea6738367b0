"""The checks of the doctor: functions from a `Job`, the known facts, to findings."""
