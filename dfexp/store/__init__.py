"""A run's second copy on S3: put once, verified, and enough to go on from on another machine."""

from dfexp.store.check import check, open_uploads
from dfexp.store.restore import Restored, fetch_rows, restore
from dfexp.store.uploader import Uploader
from dfexp.store.verify import Verdict, verify

__all__ = ["Restored", "Uploader", "Verdict", "check", "fetch_rows", "open_uploads", "restore", "verify"]
