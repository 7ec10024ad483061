"""What runs the tasks."""
