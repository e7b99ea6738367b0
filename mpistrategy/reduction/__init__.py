"""Every reduction, whoever asks for it: plans, and the routes that the data take."""
