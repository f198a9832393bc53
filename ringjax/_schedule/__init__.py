"""What each device computes, keeps and sends in each step, and what that costs: integers alone."""
