"""The checks of the doctor: functions from what is known of a job to findings."""
