"""Background tasks: durable records of children that outlive the run that started them."""
