"""The checks of the doctor: functions from facts to findings."""
