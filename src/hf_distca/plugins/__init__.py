"""What trainers that load plugins by name find here, one file for each trainer."""
