"""Mistakes that one rank makes: small programs, what each must come to, and what cannot be seen by design."""
