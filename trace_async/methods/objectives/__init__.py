"""The off-policy-corrected objectives, one file each, and what they share."""
