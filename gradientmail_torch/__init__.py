"""Train one PyTorch model on machines that share nothing but a bucket."""
