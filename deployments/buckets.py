"""Create buckets that do not exist: `python buckets.py NAME ...`. The address is AWS_ENDPOINT_URL_S3."""

from __future__ import annotations

import sys

from botocore.exceptions import ClientError
from botocore.session import get_session

client = get_session().create_client("s3")
for name in sys.argv[1:]:
    try:
        client.create_bucket(Bucket=name)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou"):
            raise
