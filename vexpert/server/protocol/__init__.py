"""Request bodies: what is accepted, and what each field becomes."""
