"""Secrets that tests put into the environment, and that nothing may show."""

PLANTED = {
    "WANDB_API_KEY": "0f3c9a7be1d2",
    "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.payload.signature",
    "SLURM_JOB_COMMENT": "token=s3cr3t-of-mine",
    "MY_SECRET": "hunter2hunter2",
    "DB_PASSWORD": "correct horse",
}
