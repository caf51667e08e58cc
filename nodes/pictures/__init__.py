"""Pictures that nodes show."""
