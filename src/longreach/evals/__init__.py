"""What demo, run and compare measure."""
