"""Scripts that run in processes of their own, found by path; nothing here is imported by the package
except ``wire``. They must import nothing of the package.
"""
