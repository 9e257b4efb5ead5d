"""A run's second copy on S3: put once, verified, and enough to go on from on another machine."""

from dfexp.store.restore import Restored, fetch_rows, restore
from dfexp.store.uploader import Uploader, check
from dfexp.store.verify import Verdict, verify

__all__ = ["Restored", "Uploader", "Verdict", "check", "fetch_rows", "restore", "verify"]
