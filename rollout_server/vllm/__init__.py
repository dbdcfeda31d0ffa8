"""What runs inside a vLLM server: our weight transport, and the process around it. Nothing else imports vLLM."""
