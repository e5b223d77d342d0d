"""What runs inside the sandbox: sent as text to a fresh interpreter, so it imports the standard library only.

It must know nothing of the harness: whatever these modules hold in memory, the agent's code can read.
"""
