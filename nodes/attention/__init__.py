"""What a MODEL's attention computes with."""
