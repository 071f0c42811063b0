"""What a process needs to be part of a job: process group, run folder, preemption, seeding, small tensor helpers."""
